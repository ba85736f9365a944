// 200 steps from the first row of tokens to the last; `work` is script, style and layout of a step.
(async () => {
  const box = document.querySelector("[aria-label=Tokens] [role=region]");
  const work = [], frames = [], nodes = [];
  const frame = () => new Promise(requestAnimationFrame);
  const drawn = () => performance.getEntriesByName("tokens drawn").length;
  await frame();
  const first = drawn();
  for (let i = 0; i < 200; i++) {
    const before = performance.now();
    box.scrollTop = (box.scrollHeight - box.clientHeight) * i / 199;
    box.dispatchEvent(new Event("scroll"));
    await new Promise(queueMicrotask); // by then the rows are drawn
    document.body.getBoundingClientRect();
    work.push(performance.now() - before);
    await frame();
    frames.push(performance.now() - before);
    nodes.push(document.getElementsByTagName("*").length);
  }
  const of = (times) => times.sort((a, b) => a - b) && [times[100], times[190]];
  return {work: of(work), frames: of(frames), nodes: Math.max(...nodes), drawn: drawn() - first};
})()
