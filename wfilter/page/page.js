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
const tip = document.getElementById("tip");
let defined = null; // the term whose definition is shown
const place = () => {
  if (!defined) return;
  const word = defined.getBoundingClientRect();
  const under = word.bottom + 6;
  const room = window.innerHeight - under > tip.offsetHeight;
  const right = document.documentElement.clientWidth - tip.offsetWidth - 12;
  tip.style.top = `${room ? under : word.top - tip.offsetHeight - 6}px`;
  tip.style.left = `${Math.max(12, Math.min(word.left, right))}px`;
};
const define = (event) => {
  defined = event.target;
  defined.setAttribute("aria-describedby", "tip");
  tip.textContent = defined.dataset.tip;
  tip.hidden = false;
  place();
};
const hide = () => { defined = null; tip.hidden = true; };
for (const term of document.querySelectorAll(".term")) {
  for (const kind of ["mouseenter", "focus", "click"]) term.addEventListener(kind, define);
  for (const kind of ["mouseleave", "blur"]) term.addEventListener(kind, hide);
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
document.addEventListener("scroll", place, { passive: true });
const links = [...document.querySelectorAll("nav a")];
const watch = () => {
  const passed = links.filter((link) => {
    const part = document.getElementById(link.hash.slice(1));
    return part.getBoundingClientRect().top < window.innerHeight / 3;
  });
  links.forEach((link) => link.removeAttribute("aria-current"));
  (passed.at(-1) ?? links[0]).setAttribute("aria-current", "true");
};
document.addEventListener("scroll", watch, { passive: true });
watch();
