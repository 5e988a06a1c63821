"use strict";
// In the head, before anything is drawn: a page that opens dark must not flash white.
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function chosenTheme() {
  try {
    return localStorage.getItem("fedsc-theme");
  } catch {
    return null; // a browser may refuse storage to files
  }
}

function rememberTheme(theme) {
  try {
    localStorage.setItem("fedsc-theme", theme);
  } catch {
    // then it lasts as long as the page
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

setTheme(chosenTheme() ?? (systemIsDark.matches ? "dark" : "light"));
