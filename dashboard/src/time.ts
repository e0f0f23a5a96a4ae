// The server's clock, and the formats of times.
import { signal } from "@preact/signals";

let skew = 0;

/** Synchronizes with the time of a response. */
export function setClock(serverNow: number): void {
  const measured = serverNow - Date.now();
  // Ignore small differences: slow responses would make the clock jump.
  if (Math.abs(measured - skew) > 250) skew = measured;
}

export const now = (): number => Date.now() + skew;

/** Changes twice a second. Components that show a running time read it. */
export const tick = signal(now());
setInterval(() => {
  if (!document.hidden) tick.value = now();
}, 500);

/** Formats a duration with its two largest units: `8m 40s`. */
export function span(ms: number): string {
  if (ms < 0) ms = 0;
  if (ms < 1_000) return "0s";
  const s = Math.floor(ms / 1_000);
  if (s < 60) return `${s}s`;
  const m = Math.floor(s / 60);
  if (m < 60) return `${m}m ${two(s % 60)}s`;
  const h = Math.floor(m / 60);
  if (h < 24) return `${h}h ${two(m % 60)}m`;
  return `${Math.floor(h / 24)}d ${h % 24}h`;
}

/** Formats a completed duration: `165 ms`, `2.7s`, `8m 40s`. */
export function took(ms: number): string {
  if (ms < 1_000) return `${Math.max(0, Math.round(ms))} ms`;
  return ms < 10_000 ? `${(ms / 1_000).toFixed(1)}s` : span(ms);
}

export const ago = (at: number): string => `${span(now() - at)} ago`;

/** Formats a time: `14:03:12`, with the date unless it is today. */
export function clock(at: number): string {
  const date = new Date(at);
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  if (new Date(now()).toDateString() === date.toDateString()) return time;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}`;
}

export const two = (n: number): string => String(n).padStart(2, "0");
