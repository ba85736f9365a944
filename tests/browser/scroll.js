// 200 steps from the first row to the last; `work` is script, style and layout of a step.
(async () => {
  const box = document.getElementById("tokens"), work = [], frames = [], nodes = [];
  const frame = () => new Promise(requestAnimationFrame);
  await frame();
  for (let i = 0; i < 200; i++) {
    const before = performance.now();
    box.scrollTop = (box.scrollHeight - box.clientHeight) * i / 199;
    tugline.tokens.list.update();
    document.body.getBoundingClientRect();
    work.push(performance.now() - before);
    await frame();
    frames.push(performance.now() - before);
    nodes.push(document.getElementsByTagName("*").length);
  }
  const of = (times) => times.sort((a, b) => a - b) && [times[100], times[190]];
  return {work: of(work), frames: of(frames), nodes: Math.max(...nodes)};
})()
