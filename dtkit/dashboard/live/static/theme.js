// Light or dark, as the surrounding page.

import { setAttr } from "./elements.js";

/** Follow JupyterLab's theme, or else the system's. Return a function that ends this. */
export function followTheme(root) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const set = () => {
    const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
    const dark = jpThemeLight ? jpThemeLight === "false" : vscodeThemeKind ? !vscodeThemeKind.includes("light") : system.matches;
    setAttr(root, "data-theme", dark ? "dark" : "light");
  };
  set();
  const observer = new MutationObserver(set);
  observer.observe(document.body, { attributes: true });
  system.addEventListener("change", set);
  return () => { observer.disconnect(); system.removeEventListener("change", set); };
}
