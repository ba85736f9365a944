/** Light or dark theme: that of the system, until the user chooses one. */
const system = matchMedia("(prefers-color-scheme: dark)");

function isDark(): boolean {
  const chosen = localStorage.getItem("theme");
  return chosen === null ? system.matches : chosen === "dark";
}

export const theme = $state({ dark: isDark() });

export function showTheme(): void {
  theme.dark = isDark();
  document.documentElement.dataset.theme = theme.dark ? "dark" : "light";
}

export function toggleTheme(): void {
  localStorage.setItem("theme", theme.dark ? "light" : "dark");
  showTheme();
}

system.addEventListener("change", showTheme);
