// The layout of the timeline: pure functions, used by drawing and by hit testing.
import type { Tenure, Wait } from "../api";
import type { Lane } from "../live";

export const BAR = 20;
const ABOVE = 11;
const BELOW = 7;
export const WAIT = 5;
const WAIT_GAP = 2;
/** The rows of waiters below a bar. Further waiters are only counted. */
const WAIT_ROWS = 4;

export interface View {
  from: number;
  to: number;
  width: number;
}

export interface PlacedWait {
  wait: Wait;
  row: number;
}

export interface PlacedLane {
  name: string;
  top: number;
  height: number;
  /** The top of the bars. */
  bar: number;
  tenures: Tenure[];
  waits: PlacedWait[];
  /** The current waiters that are not drawn. */
  more: number;
}

export const x = (view: View, at: number): number => ((at - view.from) / (view.to - view.from)) * view.width;

/** Orders the lanes with content: contended ones first, then the busiest, then by name. The order is stable over time. */
export function order(lanes: Map<string, Lane>, from: number, to: number, wanted: (name: string, lane: Lane) => boolean): string[] {
  const found: { name: string; contended: boolean; busy: number; last: number }[] = [];
  for (const [name, lane] of lanes) {
    let busy = 0;
    let last = 0;
    for (const { since_ms, ended_ms } of lane.tenures.values()) {
      if (since_ms <= to && (ended_ms ?? to) >= from) {
        busy += 1;
        last = Math.max(last, ended_ms ?? to);
      }
    }
    let contended = false;
    for (const { since_ms, ended_ms } of lane.waits.values()) {
      if (since_ms <= to && (ended_ms ?? to) >= from) contended = true;
    }
    if ((busy > 0 || contended) && wanted(name, lane)) found.push({ name, contended, busy, last });
  }
  found.sort(
    (a, b) =>
      Number(b.contended) - Number(a.contended) ||
      Math.floor(Math.log2(b.busy + 1)) - Math.floor(Math.log2(a.busy + 1)) ||
      Math.floor(b.last / 60_000) - Math.floor(a.last / 60_000) ||
      (a.name < b.name ? -1 : 1),
  );
  return found.map(({ name }) => name);
}

export function place(lanes: Map<string, Lane>, names: string[], view: View): { lanes: PlacedLane[]; height: number } {
  const placed: PlacedLane[] = [];
  let top = 0;
  for (const name of names) {
    const lane = lanes.get(name);
    const inside = (since: number, ended: number | null) => since <= view.to && (ended ?? Infinity) >= view.from;
    const tenures = lane ? [...lane.tenures.values()].filter((t) => inside(t.since_ms, t.ended_ms)) : [];
    tenures.sort((a, b) => a.since_ms - b.since_ms);
    const all = lane ? [...lane.waits.values()].filter((w) => inside(w.since_ms, w.ended_ms)) : [];
    all.sort((a, b) => a.since_ms - b.since_ms || a.ticket - b.ticket);
    const ends: number[] = [];
    const waits: PlacedWait[] = [];
    let more = 0;
    for (const wait of all) {
      // The first free row.
      let row = ends.findIndex((end) => end <= wait.since_ms);
      if (row < 0) row = ends.length;
      if (row >= WAIT_ROWS) {
        if (wait.ended_ms === null) more += 1;
        continue;
      }
      ends[row] = wait.ended_ms ?? Infinity;
      waits.push({ wait, row });
    }
    const rows = Math.max(1, ends.length);
    const height = ABOVE + BAR + rows * (WAIT + WAIT_GAP) + BELOW;
    placed.push({ name, top, height, bar: top + ABOVE, tenures, waits, more });
    top += height;
  }
  return { lanes: placed, height: top };
}

export const waitTop = (lane: PlacedLane, row: number): number => lane.bar + BAR + WAIT_GAP + row * (WAIT + WAIT_GAP);

/** The ticks of the axis at round local times. */
export function ticks(view: View): { at: number; major: boolean }[] {
  const steps = [5, 10, 15, 30, 60, 120, 300, 600, 900].map((s) => s * 1_000);
  const wanted = ((view.to - view.from) / view.width) * 110;
  const step = steps.find((s) => s >= wanted) ?? 1_800_000;
  const offset = new Date(view.from).getTimezoneOffset() * 60_000;
  const found: { at: number; major: boolean }[] = [];
  for (let at = Math.ceil((view.from - offset) / step) * step + offset; at <= view.to; at += step) {
    found.push({ at, major: (at - offset) % (step * 4) === 0 });
  }
  return found;
}
