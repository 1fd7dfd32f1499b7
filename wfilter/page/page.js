"use strict";
for (const group of document.querySelectorAll(".tabs")) {
  const panels = [...group.querySelectorAll(":scope > .panel")];
  const buttons = [...group.querySelectorAll('[role="tab"]')];
  const choice = group.querySelector("select");
  const show = (chosen) => {
    panels.forEach((panel, i) => { panel.hidden = i !== chosen; });
    buttons.forEach((button, i) => {
      button.setAttribute("aria-selected", String(i === chosen));
      button.tabIndex = i === chosen ? 0 : -1;
    });
  };
  buttons.forEach((button, i) => {
    button.addEventListener("click", () => show(i));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = (i + step + buttons.length) % buttons.length;
      show(next);
      buttons[next].focus();
    });
  });
  if (choice) choice.addEventListener("change", () => show(Number(choice.value)));
  show(0);
}
