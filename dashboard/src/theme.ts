// The theme: the system's, unless the user chooses one.
import { effect, signal } from "@preact/signals";

const KEPT = "leasehold-theme";
type Theme = "light" | "dark";

const system = matchMedia("(prefers-color-scheme: dark)");

function chosen(): Theme | null {
  try {
    const kept = localStorage.getItem(KEPT);
    return kept === "light" || kept === "dark" ? kept : null;
  } catch {
    return null;
  }
}

export const theme = signal<Theme>(chosen() ?? (system.matches ? "dark" : "light"));
system.addEventListener("change", () => {
  if (!chosen()) theme.value = system.matches ? "dark" : "light";
});
effect(() => {
  document.documentElement.dataset.theme = theme.value;
});

export function toggle(): void {
  theme.value = theme.value === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(KEPT, theme.value);
  } catch {
    // Storage is blocked: the choice is lost when the page is closed.
  }
}

export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
export const narrow = signal(false);
const width = matchMedia("(max-width: 720px)");
narrow.value = width.matches;
width.addEventListener("change", () => (narrow.value = width.matches));
