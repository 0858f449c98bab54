// Light or dark, as the page around is.

import { setAttr } from "./elements.js";

/** Follow JupyterLab's theme where there is one, else the system's. Returns what ends that. */
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
