// What whoever looks has chosen.
import { signal } from "@preact/signals";

export const search = signal("");
export type Filter = "contended" | "warning" | "foreign";
export const filters = signal<Set<Filter>>(new Set());
export type Tab = "locks" | "journal" | "audit";
export const tab = signal<Tab>("locks");

/** The lock whose drawer is open. It stands in the address, so that it can be sent to somebody. */
export const opened = signal<string | null>(fromAddress());
let before: HTMLElement | null = null;

export function open(name: string): void {
  if (opened.value === null) before = document.activeElement instanceof HTMLElement ? document.activeElement : null;
  opened.value = name;
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
}

export function close(): void {
  opened.value = null;
  history.replaceState(null, "", location.pathname);
  before?.focus();
  before = null;
}

function fromAddress(): string | null {
  try {
    return location.hash.length > 1 ? decodeURIComponent(location.hash.slice(1)) : null;
  } catch {
    return null;
  }
}

window.addEventListener("hashchange", () => (opened.value = fromAddress()));

/** The holder somebody is about to take a lock away from, as it was when that began. */
export interface Target {
  name: string;
  holderId: string;
  owner: string;
}
export const evicting = signal<Target | null>(null);

/** A line that tells of something that was done, for a while. */
export const notice = signal<{ text: string; bad: boolean } | null>(null);
let timer = 0;

export function say(text: string, bad = false): void {
  clearTimeout(timer);
  notice.value = { text, bad };
  timer = window.setTimeout(() => (notice.value = null), 9_000);
}
