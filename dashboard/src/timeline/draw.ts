// Draws the timeline: a lane per lock, a bar per tenure in its owner's colour, waiters as hatched lines below it, and a
// thin line for each hand-off. Ends differ by shape, not only by colour.
import type { Tenure } from "../api";
import { look, short } from "../owners";
import { two } from "../time";
import { BAR, type PlacedLane, type View, WAIT, ticks, waitTop, x } from "./layout";

export interface Colours {
  owners: string[];
  onOwner: string;
  line: string;
  faint: string;
  text: string;
  muted: string;
  panel: string;
  bad: string;
  warn: string;
  accent: string;
  font: string;
}

export const AXIS = 26;

export function colours(element: Element): Colours {
  const style = getComputedStyle(element);
  const of = (name: string) => style.getPropertyValue(name).trim();
  return {
    owners: Array.from({ length: 10 }, (_, n) => of(`--owner-${n}`)),
    onOwner: of("--on-owner"),
    line: of("--line"),
    faint: of("--line-faint"),
    text: of("--text"),
    muted: of("--muted"),
    panel: of("--panel"),
    bad: of("--bad"),
    warn: of("--warn"),
    accent: of("--accent"),
    font: style.fontFamily,
  };
}

export interface Scene {
  lanes: PlacedLane[];
  view: View;
  now: number;
  hovered: unknown;
  stale: boolean;
}

const patterns = new Map<string, CanvasPattern | null>();

export function draw(canvas: CanvasRenderingContext2D, scene: Scene, c: Colours, height: number): void {
  const { view, lanes, now } = scene;
  canvas.clearRect(0, 0, view.width, height);
  canvas.textBaseline = "middle";
  axis(canvas, scene, c, height);
  canvas.save();
  canvas.translate(0, AXIS);
  for (const lane of lanes) {
    if (lane !== lanes[0]) {
      canvas.fillStyle = c.faint;
      canvas.fillRect(0, lane.top, view.width, 1);
    }
    for (const { wait, row } of lane.waits) {
      const left = x(view, wait.since_ms);
      const right = x(view, Math.min(wait.ended_ms ?? now, now));
      hatch(canvas, c, look(wait.owner).colour, left, waitTop(lane, row), Math.max(right - left, 2), scene.hovered === wait);
    }
    const byHolder = new Map(lane.tenures.map((t) => [t.holder_id, t]));
    for (const tenure of lane.tenures) bar(canvas, scene, c, lane, tenure);
    for (const tenure of lane.tenures) if (tenure.after) handOver(canvas, scene, c, lane, tenure, byHolder.get(tenure.after));
    if (lane.more > 0) {
      canvas.fillStyle = c.muted;
      canvas.font = `11px ${c.font}`;
      canvas.textAlign = "right";
      canvas.fillText(`+${lane.more}`, view.width - 4, lane.bar + BAR + 8);
    }
  }
  canvas.restore();
  const at = x(view, now);
  if (at >= 0 && at <= view.width) {
    canvas.fillStyle = scene.stale ? c.muted : c.accent;
    canvas.fillRect(Math.round(at) - 0.5, AXIS - 5, 1, height - AXIS + 5);
    canvas.beginPath();
    canvas.arc(Math.round(at), AXIS - 6, 2.5, 0, 7);
    canvas.fill();
  }
}

function axis(canvas: CanvasRenderingContext2D, { view }: Scene, c: Colours, height: number): void {
  canvas.font = `11px ${c.font}`;
  canvas.textAlign = "center";
  const fine = view.to - view.from < 8 * 60_000;
  for (const { at, major } of ticks(view)) {
    const left = Math.round(x(view, at));
    canvas.fillStyle = major ? c.line : c.faint;
    canvas.fillRect(left, AXIS - 4, 1, height);
    if (left < 24 || left > view.width - 24) continue;
    const date = new Date(at);
    const minutes = `${two(date.getHours())}:${two(date.getMinutes())}`;
    canvas.fillStyle = c.muted;
    canvas.fillText(fine ? `${minutes}:${two(date.getSeconds())}` : minutes, left, 10);
  }
}

function bar(canvas: CanvasRenderingContext2D, scene: Scene, c: Colours, lane: PlacedLane, tenure: Tenure): void {
  const { view, now } = scene;
  const open = tenure.ended_ms === null;
  const begin = x(view, tenure.since_ms);
  const end = x(view, Math.min(tenure.ended_ms ?? now, now));
  const left = Math.max(begin, -8);
  // One pixel of space between neighbours, and at least two pixels of width.
  const width = Math.max(Math.min(end, view.width + 8) - left - (open ? 0 : 1), 2);
  const right = left + width;
  const top = lane.bar;
  const { colour, pattern } = look(tenure.owner);
  const fill = c.owners[colour] ?? c.accent;
  canvas.save();
  canvas.globalAlpha = scene.stale ? 0.45 : open || scene.hovered === tenure ? 1 : 0.86;
  const square = !open && tenure.end !== "expired";
  shape(canvas, left, top, width, BAR, begin < -8 ? 0 : 4, square ? 2 : 0);
  if (tenure.end === "expired") {
    const fade = canvas.createLinearGradient(left, 0, right, 0);
    fade.addColorStop(0, fill);
    fade.addColorStop(Math.max(0, 1 - 34 / Math.max(width, 35)), fill);
    fade.addColorStop(1, transparent(fill));
    canvas.fillStyle = fade;
  } else {
    canvas.fillStyle = fill;
  }
  canvas.fill();
  if (pattern > 0) {
    canvas.save();
    canvas.clip();
    canvas.fillStyle = texture(canvas, pattern, c.onOwner) ?? fill;
    canvas.fillRect(left, top, width - (tenure.end === "expired" ? Math.min(30, width) : 0), BAR);
    canvas.restore();
  }
  if (scene.hovered === tenure) {
    canvas.strokeStyle = c.text;
    canvas.lineWidth = 1.5;
    canvas.stroke();
  }
  // The owner's name if it fits; at the left edge if the bar begins before it.
  const room = width - 14 - (tenure.end === "expired" ? 20 : 0);
  if (room > 22) {
    canvas.clip();
    canvas.font = `600 11.5px ${c.font}`;
    canvas.textAlign = "left";
    canvas.fillStyle = c.onOwner;
    canvas.fillText(fitted(canvas, short(tenure.owner), room), Math.max(left, 0) + 7, top + BAR / 2 + 0.5);
  }
  canvas.restore();
  if (!open) ending(canvas, c, tenure, right, top);
  else if (!scene.stale) {
    canvas.fillStyle = c.text;
    canvas.globalAlpha = 0.55;
    canvas.fillRect(right - 1.5, top, 1.5, BAR);
    canvas.globalAlpha = 1;
  }
}

/** Draws the end of a bar: plain for released, with a mark for all others. */
function ending(canvas: CanvasRenderingContext2D, c: Colours, tenure: Tenure, right: number, top: number): void {
  switch (tenure.end) {
    case "lost":
      canvas.fillStyle = c.panel;
      canvas.fillRect(right - 5, top - 2, 1.5, BAR + 4);
      canvas.fillStyle = c.bad;
      canvas.fillRect(right - 3.5, top - 3, 4, BAR + 6);
      break;
    case "revoked":
      path(canvas, [[right + 1, top], [right - 9, top + BAR / 2], [right + 1, top + BAR]]);
      canvas.fillStyle = c.panel;
      canvas.fill();
      path(canvas, [[right + 1, top + 3], [right - 6, top + BAR / 2], [right + 1, top + BAR - 3]]);
      canvas.fillStyle = c.warn;
      canvas.fill();
      break;
    case "forced":
      canvas.fillStyle = c.bad;
      canvas.fillRect(right - 1, top - 9, 2, BAR + 9);
      path(canvas, [[right + 1, top - 9], [right + 11, top - 5], [right + 1, top - 1]]);
      canvas.fill();
      break;
    case "expired":
      canvas.strokeStyle = c.muted;
      canvas.lineWidth = 1;
      canvas.setLineDash([2, 2.5]);
      canvas.beginPath();
      canvas.moveTo(right - 0.5, top);
      canvas.lineTo(right - 0.5, top + BAR);
      canvas.stroke();
      canvas.setLineDash([]);
      break;
    default:
  }
}

/** Draws a hand-off: an arc from the old bar to the new one, and a line up from the holder's wait. */
function handOver(
  canvas: CanvasRenderingContext2D,
  { view, stale }: Scene,
  c: Colours,
  lane: PlacedLane,
  tenure: Tenure,
  before: Tenure | undefined,
): void {
  const at = x(view, tenure.since_ms);
  if (at < -12 || at > view.width + 12) return;
  canvas.strokeStyle = c.text;
  canvas.fillStyle = c.text;
  canvas.globalAlpha = stale ? 0.35 : 0.75;
  canvas.lineWidth = 1.25;
  const from = before?.ended_ms ? Math.min(x(view, before.ended_ms), at) : at;
  canvas.beginPath();
  canvas.moveTo(from - 6, lane.bar);
  canvas.bezierCurveTo(from - 5, lane.bar - 7.5, at + 4, lane.bar - 7.5, at + 5.5, lane.bar - 1);
  canvas.stroke();
  canvas.beginPath();
  canvas.arc(at + 5.5, lane.bar, 1.8, 0, 7);
  canvas.fill();
  const stood = lane.waits.find(({ wait }) => wait.owner === tenure.owner && wait.ended_ms === tenure.since_ms);
  if (stood) {
    canvas.beginPath();
    canvas.moveTo(at, waitTop(lane, stood.row) + WAIT / 2);
    canvas.lineTo(at, lane.bar + BAR);
    canvas.stroke();
  }
  canvas.globalAlpha = 1;
}

function hatch(canvas: CanvasRenderingContext2D, c: Colours, colour: number, left: number, top: number, width: number, hovered: boolean): void {
  const fill = c.owners[colour] ?? c.accent;
  canvas.save();
  canvas.beginPath();
  canvas.rect(left, top, width, WAIT);
  canvas.clip();
  canvas.globalAlpha = hovered ? 0.45 : 0.22;
  canvas.fillStyle = fill;
  canvas.fillRect(left, top, width, WAIT);
  canvas.globalAlpha = 1;
  canvas.strokeStyle = fill;
  canvas.lineWidth = 1.6;
  canvas.beginPath();
  const from = Math.max(left, 0);
  // Anchored at the start of the bar, so that the lines do not move as time passes.
  for (let at = from - ((from - left) % 5) - WAIT; at < Math.min(left + width, 6_000); at += 5) {
    canvas.moveTo(at, top + WAIT);
    canvas.lineTo(at + WAIT, top);
  }
  canvas.stroke();
  canvas.restore();
}

function shape(canvas: CanvasRenderingContext2D, left: number, top: number, width: number, height: number, begin: number, end: number): void {
  const r = Math.min(begin, width / 2);
  const e = Math.min(end, width / 2);
  canvas.beginPath();
  canvas.roundRect(left, top, width, height, [r, e, e, r]);
}

function path(canvas: CanvasRenderingContext2D, points: [number, number][]): void {
  canvas.beginPath();
  points.forEach(([px, py], n) => (n === 0 ? canvas.moveTo(px, py) : canvas.lineTo(px, py)));
  canvas.closePath();
}

function fitted(canvas: CanvasRenderingContext2D, text: string, room: number): string {
  if (canvas.measureText(text).width <= room) return text;
  let cut = text.length;
  while (cut > 1 && canvas.measureText(`${text.slice(0, cut)}…`).width > room) cut -= 1;
  return cut > 1 ? `${text.slice(0, cut)}…` : "";
}

/** Stripes, dots and squares, for owners beyond the tenth. */
function texture(canvas: CanvasRenderingContext2D, pattern: number, colour: string): CanvasPattern | null {
  const id = `${pattern} ${colour}`;
  const known = patterns.get(id);
  if (known !== undefined) return known;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const on = tile.getContext("2d");
  if (!on) return null;
  on.strokeStyle = on.fillStyle = colour;
  on.globalAlpha = 0.3;
  on.lineWidth = 2;
  if (pattern === 1) {
    for (const d of [-8, 0, 8]) {
      on.moveTo(d, 8);
      on.lineTo(d + 8, 0);
    }
    on.stroke();
  } else if (pattern === 2) {
    on.arc(4, 4, 1.6, 0, 7);
    on.fill();
  } else {
    on.fillRect(0, 0, 4, 4);
    on.fillRect(4, 4, 4, 4);
  }
  const made = canvas.createPattern(tile, "repeat");
  patterns.set(id, made);
  return made;
}

/** Returns the colour with zero alpha. */
const transparent = (colour: string): string => `${colour.slice(0, 7)}00`;
