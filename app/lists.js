// What is shown as a list: the plan of a text, the sentences that were made, the history, and the card of a saved voice.
//
// Each is a component whose value the server gives; a button names its event, the entry and the sentence to the server.
(() => {
  const make = (tag, text = "", attributes = {}) => {
    const node = document.createElement(tag);
    node.textContent = text;
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const words = (text, tag = "span") => make(tag, text, {translate: "no"}); // of a person, not of the page
  const seconds = (value) => `${value.toFixed(1)} s`;
  const clock = (value) => `${Math.floor(value / 60)}:${String(Math.round(value % 60)).padStart(2, "0")}`;

  const button = (text, act, label = text) => {
    const node = make("button", text, {type: "button", class: "pill", "aria-label": label});
    node.onclick = () => act(node);
    return node;
  };
  // The second click within a few seconds counts.
  const careful = (text, act) =>
    button(text, (node) => {
      if (node.dataset.sure) return act();
      node.dataset.sure = "yes";
      node.textContent = "Really delete";
      node.setAttribute("aria-label", "Really delete");
      setTimeout(() => {
        delete node.dataset.sure;
        node.textContent = text;
        node.setAttribute("aria-label", text);
      }, 4000);
    });

  // Now, and whenever the value changes: a component in a fold is made when the fold is opened.
  const shown = (watch, show) => {
    watch("value", show);
    show();
  };

  const silence = (value) => make("li", `pause of ${value.toFixed(2)} s`, {class: "pause"});

  window.mynahPlan = (element, props, watch) => shown(watch, () => {
    const {problem, sentences = [], warnings = [], seconds: all} = props.value ?? {};
    const list = make("ol");
    for (const sentence of sentences) {
      if (sentence.before) list.append(silence(sentence.before));
      const item = make("li", "", {class: "sentence"});
      item.append(words(sentence.text), make("small", `about ${seconds(sentence.seconds)}`));
      if (sentence.written) item.append(words(sentence.written, "del"));
      list.append(item);
      if (sentence.after) list.append(silence(sentence.after));
    }
    const count = sentences.length === 1 ? "1 sentence" : `${sentences.length} sentences`;
    const said = problem ?? (sentences.length ? `${count}, about ${seconds(all)}` : "Write a text to see it here.");
    element.querySelector("[data-list]").replaceChildren(
      make("p", said, {class: problem ? "problem" : "", role: "status"}), list,
      ...warnings.map((warning) => make("p", warning, {class: "problem"})));
  });

  window.mynahSentences = (element, props, watch, trigger) => shown(watch, () => {
    const {id, sentences = []} = props.value ?? {};
    const list = make("ol");
    for (const {index, text, seconds: long, expected, odd, again} of sentences) {
      const item = make("li", "", {class: odd ? "sentence odd" : "sentence"});
      item.append(words(text), make("small", again ? `${seconds(long)}, said again` : seconds(long)));
      if (odd) item.append(make("em", `About ${seconds(expected)} would fit its text.`));
      const row = make("span", "", {class: "row"});
      row.append(
        button("Play", () => trigger("play", {id, sentence: index}), `Play sentence ${index + 1}`),
        button("Say it again", () => trigger("retry", {id, sentence: index}), `Say sentence ${index + 1} again`));
      item.append(row);
      list.append(item);
    }
    const odd = sentences.filter((sentence) => sentence.odd).length;
    const card = element.querySelector("[data-list]");
    card.hidden = !sentences.length;
    mynahSay(card.querySelector("summary"), odd ? `Sentences: ${odd} to listen to` : "Sentences");
    if (odd) card.open = true;
    card.querySelector("div").replaceChildren(list);
  });

  const state = ({live, resumable, sentences, planned}) =>
    live ? "being made" : resumable ? `${sentences} of ${planned} sentences` : "";

  window.mynahHistory = (element, props, watch, trigger) => shown(watch, () => {
    const {entries = []} = props.value ?? {};
    const items = entries.map((entry) => {
      const {id, made, text, mode, voice, seconds: long, sentences, live, resumable} = entry;
      const item = make("article", "", {"data-entry": id});
      item.append(text ? words(text, "p") : make("p", "A recording"));
      const facts = [new Date(made).toLocaleString([], {dateStyle: "short", timeStyle: "short"}), clock(long), mode];
      const line = make("small", [...facts, state(entry)].filter(Boolean).join(" · "));
      item.append(line);
      if (voice) line.append(" · ", words(voice));
      const row = make("div", "", {class: "row"});
      if (sentences) row.append(
        button("Play", () => trigger("play", {id})),
        button("SRT", () => trigger("download", {id, kind: "srt"}), "Save subtitles as SRT"),
        button("VTT", () => trigger("download", {id, kind: "vtt"}), "Save subtitles as VTT"));
      if (resumable) row.append(button("Go on", () => trigger("submit", {id})));
      row.append(button("Use its settings", () => trigger("edit", {id})));
      if (!live) row.append(careful("Delete", () => trigger("delete", {id})));
      item.append(row);
      return item;
    });
    const none = make("p", "Nothing yet. What is spoken is kept here, sentence by sentence.");
    element.querySelector("[data-list]").replaceChildren(...(items.length ? items : [none]));
  });

  window.mynahVoiceCard = (element, props, watch, trigger) => {
    let sound = null; // that plays
    shown(watch, () => {
      sound?.pause();
      const {name, description, seconds: long, transcript, consent, agreed} = props.value ?? {};
      const card = element.querySelector("[data-list]");
      if (!name) return card.replaceChildren();
      const facts = make("p");
      facts.append(words(name, "strong"), make("small", seconds(long)));
      const row = make("div", "", {class: "row"});
      row.append(
        button("Listen", () => trigger("play", {})),
        button("Export", () => trigger("download", {})),
        careful("Delete", () => trigger("delete", {})));
      const date = new Date(agreed).toLocaleDateString();
      const record = make("small", `consent of ${date}`);
      record.append(": ", words(consent));
      card.replaceChildren(facts, ...[description, transcript].filter(Boolean).map((text) => words(text, "p")), record, row);
    });
    window.mynahHear = (address) => {
      sound?.pause();
      sound = new Audio(address);
      sound.play().catch(() => {});
    };
  };

  // A file that the server gave in its answer; no address leads to it afterwards.
  window.mynahSave = ({name, content, sound} = {}) => {
    if (sound) return mynahHear(sound);
    if (!name) return;
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    const address = URL.createObjectURL(new Blob([bytes]));
    const link = make("a", "", {href: address, download: name});
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  };
})();
