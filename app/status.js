// The status line: model, engines, device and memory in use, asked for while somebody looks at the page.
(() => {
  const ask = async () => {
    const line = document.querySelector("#status");
    if (!line || document.hidden) return;
    try {
      const {memory} = await (await fetch("health")).json();
      line.dataset.state = "up";
      mynahSay(line.querySelector("[data-status=memory]"), memory);
    } catch {
      line.dataset.state = "down";
      mynahSay(line.querySelector("[data-status=memory]"), "the server does not answer");
    }
  };
  setInterval(ask, 10000);
  addEventListener("visibilitychange", ask);
  setTimeout(ask, 1000);
})();
