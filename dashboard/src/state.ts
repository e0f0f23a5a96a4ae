// The user's choices.
import { signal } from "@preact/signals";

export const search = signal("");
export type Filter = "contended" | "warning" | "foreign";
export const filters = signal<Set<Filter>>(new Set());
export type Tab = "locks" | "journal" | "audit";
export const tab = signal<Tab>("locks");

/** The lock whose drawer is open. It is in the URL, so that the link can be shared. */
export const opened = signal<string | null>(fromUrl());
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

function fromUrl(): string | null {
  try {
    return location.hash.length > 1 ? decodeURIComponent(location.hash.slice(1)) : null;
  } catch {
    return null;
  }
}

window.addEventListener("hashchange", () => (opened.value = fromUrl()));

/** The holder to evict, as of when the dialog was opened. */
export interface Target {
  name: string;
  holderId: string;
  owner: string;
}
export const evicting = signal<Target | null>(null);

/** A notification that is shown for some seconds. */
export const notice = signal<{ text: string; bad: boolean } | null>(null);
let timer = 0;

export function notify(text: string, bad = false): void {
  clearTimeout(timer);
  notice.value = { text, bad };
  timer = window.setTimeout(() => (notice.value = null), 9_000);
}
