// The server's clock, and how times are said.
import { signal } from "@preact/signals";

let skew = 0;

/** Every answer says when it was given; the page counts on from there. */
export function setClock(serverNow: number): void {
  const measured = serverNow - Date.now();
  // An answer that took long would make the clock jump back and forth.
  if (Math.abs(measured - skew) > 250) skew = measured;
}

export const now = (): number => Date.now() + skew;

/** Changes twice a second: whatever shows a time that passes reads it. */
export const tick = signal(now());
setInterval(() => {
  if (!document.hidden) tick.value = now();
}, 500);

/** `8m 40s`: the two largest units. */
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

/** `165 ms`, `2.7s`, `8m 40s`: for things that are over. */
export function took(ms: number): string {
  if (ms < 1_000) return `${Math.max(0, Math.round(ms))} ms`;
  return ms < 10_000 ? `${(ms / 1_000).toFixed(1)}s` : span(ms);
}

export const ago = (at: number): string => `${span(now() - at)} ago`;

/** `14:03:12`, and the day where it is not today. */
export function clock(at: number): string {
  const date = new Date(at);
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  if (new Date(now()).toDateString() === date.toDateString()) return time;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}`;
}

export const two = (n: number): string => String(n).padStart(2, "0");
