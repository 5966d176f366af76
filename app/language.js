// English or Chinese, switched in the page. The English text is the key (chinese.json; `{}` stands for anything), so
// the server and the other scripts know nothing of languages: whatever text appears is looked up here.
(() => {
  const exact = new Map();
  const patterns = [];
  for (const [english, chinese] of Object.entries(mynahChinese)) {
    if (!english.includes("{}")) exact.set(english, chinese);
    else {
      const parts = english.split("{}").map((part) => part.replace(/[.*+?^$()|[\]\\]/g, "\\$&"));
      patterns.push([new RegExp(`^${parts.join("(.+?)")}$`, "s"), chinese]);
    }
  }
  const ATTRIBUTES = ["placeholder", "aria-label", "title"];
  const seen = new WeakMap(); // node -> per place, the English text and what stands there for it
  let language = localStorage.getItem("mynah-language") ?? (navigator.language.startsWith("zh") ? "zh" : "en");

  const translated = (english) => {
    if (language === "en") return english;
    const text = english.trim().replace(/\s+/g, " ");
    const around = (chinese) => english.replace(/\S[^]*\S|\S/, () => chinese);
    if (exact.has(text)) return around(exact.get(text));
    if (text.includes(" · ")) return around(text.split(" · ").map(translated).join(" · "));
    for (const [pattern, chinese] of patterns) {
      const found = pattern.exec(text)?.slice(1);
      if (found) return around(found.reduce((said, part) => said.replace("{}", () => translated(part)), chinese));
    }
    return english;
  };

  const place = (node, name, now, write) => {
    const known = seen.get(node) ?? seen.set(node, {}).get(node);
    const english = known[name]?.shown === now ? known[name].english : now;
    const shown = translated(english);
    known[name] = {english, shown};
    if (shown !== now) write(shown);
  };

  const visit = (root) => {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT);
    for (let node = root; node; node = walker.nextNode()) {
      if (node.nodeType === Node.TEXT_NODE) {
        // What a person has written is no text of the page.
        if (node.data.trim() && !node.parentElement?.closest("script, style, textarea, [translate=no]"))
          place(node, "text", node.data, (text) => { node.data = text; });
      } else if (node.nodeType === Node.ELEMENT_NODE) {
        for (const name of ATTRIBUTES) {
          const text = node.getAttribute(name);
          if (text) place(node, name, text, (other) => node.setAttribute(name, other));
        }
      }
    }
  };

  const everything = () => {
    document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
    const button = document.querySelector("#language");
    const [text, lang] = language === "zh" ? ["English", "en"] : ["中文", "zh-CN"];
    if (button) Object.assign(button, {textContent: text, lang});
    visit(document.body);
  };

  // Puts an English text into an element, once; what is shown may be its translation.
  const said = new WeakMap();
  window.mynahSay = (element, english) => {
    if (said.get(element) === english) return;
    said.set(element, english);
    element.textContent = english;
  };

  addEventListener("click", ({target}) => {
    if (target.id !== "language") return;
    language = language === "zh" ? "en" : "zh";
    localStorage.setItem("mynah-language", language);
    everything();
  });
  const start = () => {
    new MutationObserver((changes) => {
      for (const {type, target, addedNodes} of changes)
        if (type === "childList") addedNodes.forEach(visit);
        else visit(target);
      if (document.querySelector("#language")?.textContent === "中文" && language === "zh") everything();
    }).observe(document.body, {childList: true, subtree: true, characterData: true, attributeFilter: ATTRIBUTES});
    everything();
  };
  if (document.body) start();
  else addEventListener("DOMContentLoaded", start);
})();
