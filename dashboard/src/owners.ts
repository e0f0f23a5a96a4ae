// Owners and their colours: ten distinguishable colours, then the same ten with patterns.
import { shown } from "./text";

/** `tts-worker-3@gpu-a (pid 812)` without the process id, so that a restarted worker keeps its colour. */
export const worker = (owner: string): string => owner.replace(/ \(pid \d+\)$/, "");
/** The name of a worker, such as `tts-worker-3`, escaped. */
export const short = (owner: string): string => shown(worker(owner).replace(/@[^@]*$/, "") || owner);

const COLOURS = 10;
const PATTERNS = 4;

export interface Look {
  colour: number;
  pattern: number;
}

const given = new Map<string, Look>();
const used = new Set<number>();

/** An owner's slot by hash, or the next free one: colours repeat only beyond forty owners. */
export function look(owner: string): Look {
  const who = worker(owner);
  const known = given.get(who);
  if (known) return known;
  const home = hash(who) % COLOURS;
  let slot = home;
  for (let level = 0; level < PATTERNS; level += 1) {
    let free = -1;
    for (let n = 0; n < COLOURS && free < 0; n += 1) {
      const candidate = level * COLOURS + ((home + n) % COLOURS);
      if (!used.has(candidate)) free = candidate;
    }
    if (free >= 0) {
      slot = free;
      break;
    }
    if (level === PATTERNS - 1) slot = hash(who) % (COLOURS * PATTERNS);
  }
  used.add(slot);
  const found = { colour: slot % COLOURS, pattern: Math.floor(slot / COLOURS) };
  given.set(who, found);
  return found;
}

function hash(text: string): number {
  let h = 2_166_136_261;
  for (let i = 0; i < text.length; i += 1) h = Math.imul(h ^ text.charCodeAt(i), 16_777_619);
  return h >>> 0;
}
