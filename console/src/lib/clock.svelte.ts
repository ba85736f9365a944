/** The current time in Unix seconds, for ages; updated every five seconds. */
export const clock = $state({ now: Date.now() / 1000 });
setInterval(() => {
  if (!document.hidden) clock.now = Date.now() / 1000;
}, 5000);
