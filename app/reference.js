// The verdict on a recording and the part of it that is used: lit on its waveform, with an edge to drag at each end.
//
// The component's value goes to the server with Speak: `window` in seconds, and in `stale_words` the transcript that
// was written for another cut of the recording.
document.documentElement.classList.toggle("mynah-insecure", !isSecureContext);

window.mynahReference = (element, props, watch) => {
  const find = (name) => element.querySelector(`[data-ref=${name}]`);
  const [begin, end, canvas] = ["begin", "end", "wave"].map(find);
  const words = () => document.querySelector("#transcript textarea")?.value.trim() ?? "";
  let report = null; // what the server said of the recording
  let former = null; // transcript that stood there with an earlier recording

  let whole = 0; // until then a recording that comes is used whole: it is the part that was used before
  addEventListener("mynah-whole", () => { whole = Date.now() + 8000; });

  const keep = () => { props.value = report; };

  const choose = ([from, to]) => {
    const room = Math.min(0.5, report.seconds);
    from = Math.max(0, Math.min(from, report.seconds - room));
    to = Math.min(report.seconds, Math.max(to, from + room));
    report = {...report, window: [from, to], stale_words: words() || null};
    show();
    keep();
  };

  const draw = () => {
    const scale = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale];
    Object.assign(canvas, {width, height});
    const pen = canvas.getContext("2d");
    const colour = (name) => getComputedStyle(canvas).getPropertyValue(`--${name}`);
    const {peaks, speech, seconds, window: [from, to]} = report;
    const x = (time) => (time / seconds) * width;
    pen.fillStyle = colour("lit");
    pen.fillRect(x(from), 0, x(to) - x(from), height);
    pen.fillStyle = colour("speech");
    for (const [first, last] of speech) pen.fillRect(x(first), height - 3 * scale, x(last) - x(first), 3 * scale);
    const loudest = Math.max(...peaks, 0.02);
    const step = width / peaks.length;
    peaks.forEach((peak, i) => {
      const time = ((i + 0.5) / peaks.length) * seconds;
      pen.fillStyle = colour(time >= from && time <= to ? "heard" : "made");
      const tall = Math.max(scale, (peak / loudest) * (height - 8 * scale));
      pen.fillRect(i * step, (height - tall) / 2, Math.max(1, step * 0.6), tall);
    });
  };

  const show = () => {
    find("card").hidden = !report;
    if (!report) return;
    find("card").dataset.level = report.level;
    mynahSay(find("headline"), report.headline);
    mynahSay(find("facts"), report.facts ?? "");
    find("remarks").replaceChildren(...report.remarks.map((remark) => {
      const item = document.createElement("li");
      item.textContent = remark;
      return item;
    }));
    const readable = report.window !== undefined;
    find("strip").hidden = find("choice").hidden = !readable;
    find("stale").hidden = !(report.stale_words && report.stale_words === words());
    if (!readable) return;
    begin.max = end.max = report.seconds;
    [begin.value, end.value] = report.window;
    const [from, to] = report.window.map((edge) => edge.toFixed(1));
    mynahSay(find("part"), `Used: ${from} to ${to} s`);
    draw();
  };

  begin.oninput = () => choose([Number(begin.value), report.window[1]]);
  end.oninput = () => choose([Math.min(report.window[0], end.value - 0.5), Number(end.value)]);
  find("proposed").onclick = () => choose(report.proposed);
  find("whole").onclick = () => choose([0, report.seconds]);
  addEventListener("input", ({target}) => {
    if (!report || !target.closest("#transcript")) return;
    former = words();
    show();
  });
  const fresh = () => { // the words were just written down from this cut
    former = words();
    if (!report) return;
    report = {...report, stale_words: null};
    show();
    keep();
  };
  addEventListener("mynah-words", () => setTimeout(fresh, 100)); // the field shows them a moment later
  watch("value", () => {
    if (props.value === report) return;
    const same = props.value && report && props.value.key === report.key; // refined afterwards; the cut stays
    const {window: cut, stale_words: stale = null} = report ?? {};
    report = props.value?.headline ? {...props.value} : null;
    if (report) {
      // Words that came together with the recording, as those of an example, are no old ones.
      report.stale_words = same ? stale : former && words() === former ? former : null;
      if (same && cut) report.window = cut;
      else if (Date.now() < whole && report.seconds) report.window = [0, report.seconds];
      former = words();
    }
    show();
    if (report) keep();
  });
  const again = () => report?.window && draw();
  new ResizeObserver(again).observe(canvas);
  new MutationObserver(again).observe(document.body, {attributeFilter: ["class"]}); // dark mode
};
