/** Light or dark theme: that of the system, until the user chooses one. */
const KEY = "theme";
const system = matchMedia("(prefers-color-scheme: dark)");

let chosen = read();

/** The theme that the user chose before; null without a storage, as in a sandboxed frame. */
function read(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function isDark(): boolean {
  return chosen === null ? system.matches : chosen === "dark";
}

export const theme = $state({ dark: isDark() });

export function showTheme(): void {
  theme.dark = isDark();
  document.documentElement.dataset.theme = theme.dark ? "dark" : "light";
}

export function toggleTheme(): void {
  chosen = theme.dark ? "light" : "dark";
  try {
    localStorage.setItem(KEY, chosen);
  } catch {
    // it lasts until the page is closed
  }
  showTheme();
}

system.addEventListener("change", showTheme);
