// Light or dark: the system's setting, unless the user has chosen.
// A classic script, because it runs before the first paint.
"use strict";
(() => {
  const kept = () => {
    try {
      return localStorage.getItem("tokend.theme");
    } catch {
      return null; // storage is switched off
    }
  };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = kept();
    document.documentElement.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
    document.dispatchEvent(new Event("themechange"));
  };
  system.addEventListener("change", apply);
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const say = () => {
      const dark = document.documentElement.dataset.theme === "dark";
      button.setAttribute("aria-label", dark ? "Use light colours" : "Use dark colours");
      button.title = button.getAttribute("aria-label");
    };
    document.addEventListener("themechange", say);
    say();
    button.addEventListener("click", () => {
      const wanted = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      try {
        if ((wanted === "dark") === system.matches) localStorage.removeItem("tokend.theme");
        else localStorage.setItem("tokend.theme", wanted);
        apply();
      } catch {
        document.documentElement.dataset.theme = wanted; // for this visit
        document.dispatchEvent(new Event("themechange"));
      }
    });
  });
})();
