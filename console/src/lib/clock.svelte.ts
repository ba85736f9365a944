/** The present in Unix seconds, for ages; it moves once in five seconds. */
export const clock = $state({ now: Date.now() / 1000 });
setInterval(() => {
  if (!document.hidden) clock.now = Date.now() / 1000;
}, 5000);
