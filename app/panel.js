// Shows the player: state, clock, waveform and figures, inside the markup of ui.py. Reads `player`, changes nothing in it.
window.mynahPanel = (element, player) => {
  const WORDS = {
    idle: "Ready", waiting: "Waiting for a free place", preparing: "Preparing the voice", buffering: "Buffering",
    speaking: "Speaking", done: "Done", stopped: "Stopped", failed: "Failed",
  };
  const find = (name) => element.querySelector(`[data-mynah=${name}]`);
  const seconds = (value, digits = 2) => (value == null ? "–" : `${value.toFixed(digits)} s`);
  const card = find("card");
  const canvas = find("wave");
  find("listen").onclick = () => player.warm();

  const texts = () => {
    const {figures, state, received, played} = player;
    return {
      state: WORDS[state],
      clock: received ? `${(played / 24000).toFixed(1)} / ${(received / 24000).toFixed(1)} s` : "",
      message: player.message,
      wait: seconds(player.queueWait),
      engine: seconds(figures.first_audio),
      heard: seconds(player.heard),
      rtf: (figures.rtf ?? player.pace)?.toFixed(2) ?? "–",
      sound: seconds(figures.seconds),
      tokens: figures.tokens ?? "–",
      underruns: received ? player.underruns + player.lost : "–",
      seed: figures.seed ?? "–",
      mode: figures.mode ?? "–",
    };
  };

  const draw = () => {
    const scale = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
    const style = getComputedStyle(canvas);
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    const loudest = player.peaks.reduce((most, peak) => Math.max(most, peak), 0.2);
    const bars = Math.floor(width / (5 * scale));
    const perBar = Math.max(1, Math.ceil(player.peaks.length / bars)); // a bar is 40 ms until the width is used up
    for (let bar = 0; bar < bars; bar++) {
      const first = bar * perBar;
      const peak = first < player.peaks.length ? Math.max(...player.peaks.slice(first, first + perBar)) : 0;
      const tall = Math.max(2 * scale, (peak / loudest) * (height - 4 * scale));
      const heard = (first + perBar) * 960 <= player.played || (player.played && player.played === player.received);
      pen.fillStyle = style.getPropertyValue(peak === 0 ? "--rest" : heard ? "--heard" : "--made");
      pen.beginPath();
      pen.roundRect(bar * 5 * scale, (height - tall) / 2, 3 * scale, tall, 1.5 * scale);
      pen.fill();
    }
  };

  let drawn = false;
  const show = () => {
    drawn = false;
    for (const [name, text] of Object.entries(texts())) {
      const place = find(name);
      if (place.textContent !== String(text)) place.textContent = text;
    }
    card.dataset.state = player.state;
    find("listen").hidden = !player.blocked;
    draw();
  };
  const soon = () => {
    if (!drawn) requestAnimationFrame(show);
    drawn = true;
  };
  player.onchange = soon;
  new ResizeObserver(soon).observe(canvas);
  new MutationObserver(soon).observe(document.body, {attributeFilter: ["class"]}); // dark mode
  show();
};
