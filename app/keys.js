// Keys: Ctrl or Command with Enter speaks, Escape stops, the space bar plays and pauses outside of fields and buttons.
addEventListener("keydown", (event) => {
  const press = (id) => document.querySelector(id)?.click();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) press("#speak");
  else if (event.key === "Escape") press("#stop");
  else if (event.key === " " && !event.target.closest("input, textarea, button, summary, a, [role], [tabindex]"))
    mynahPlayer.toggle();
  else return;
  event.preventDefault();
}, true);
