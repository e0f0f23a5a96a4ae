// Everything the page knows, kept up to date: one request twice a second for what has changed, one stream of events
// that makes it ask at once.
import { batch, signal } from "@preact/signals";
import {
  type Alert,
  type Gpus,
  type Live,
  type Monitor,
  type Overview,
  Problem,
  type Seen,
  type Tenure,
  type Wait,
  ask,
  headers,
  key,
  keyWanted,
  refusal,
} from "./api";
import { now, setClock } from "./time";

export interface Lane {
  tenures: Map<string, Tenure>;
  waits: Map<number, Wait>;
}

export interface Happened {
  id: string;
  kind: string;
  name: string | null;
  owner: string | null;
  at_ms: number;
  reason: string;
}

/** By name. Changed in place; `changes` says when. */
export const locks = new Map<string, Seen>();
export const lanes = new Map<string, Lane>();
export const changes = signal(0);

export const overview = signal<Overview | null>(null);
/** Whether the stream of events is open. */
export const streaming = signal(false);
/** Since when the server does not answer. */
export const silentSince = signal<number | null>(null);
export const feed = signal<Happened[]>([]);
/** `null`: this server does not have it, or has not said yet. */
export const alerts = signal<Alert[] | null>(null);
export const gpus = signal<Gpus | null>(null);
export const monitor = signal<Monitor | null>(null);

const HOUR = 3_600_000;
const VISIBLE = 500;
const HIDDEN = 5_000;
const FEED = 120;
/** The lock by which servers agree who monitors: theirs, and nowhere else on the page either. */
const OURS = "leasehold-monitor";
/** What comes within this is asked for, or listed, together: many events must not keep the page from anything else. */
const SOON = 150;
const EAGER = 600;
/** A stream that says nothing for so long is broken: the server gives a sign of life every 15 s. */
const SILENT = 40_000;
/** The levels of a server that does not say. */
export const warningMs = (): number => monitor.value?.levels.warning_ms ?? 300_000;

let after = "";
let generation = 0;
let wake: () => void = () => {};
/** Something happened since the last question was asked. */
let poked = false;
/** Until then more is likely to come: what was told of is seen by the server's next look. */
let eager = 0;
let unlisted: Happened[] = [];

/** Begins, or begins anew with another key. */
export function start(): void {
  generation += 1;
  const mine = generation;
  after = "";
  void poll(mine);
  void follow(mine);
  void every(mine, 4_000, "/api/v1/alerts", (answer: { alerts: Alert[] } | null) => {
    alerts.value = answer?.alerts ?? null;
  });
  void every(mine, 4_000, "/api/v1/gpus", (answer: Gpus | null) => (gpus.value = answer));
  void every(mine, 15_000, "/api/v1/monitor", (answer: Monitor | null) => (monitor.value = answer));
}

export function stop(): void {
  generation += 1;
  locks.clear();
  lanes.clear();
  unlisted = [];
  batch(() => {
    overview.value = null;
    streaming.value = false;
    silentSince.value = null;
    feed.value = [];
    alerts.value = gpus.value = monitor.value = null;
    changes.value += 1;
  });
}

/** Asks for what has changed now, not at the next turn. */
export function poke(): void {
  if (document.hidden) return;
  poked = true;
  eager = Date.now() + EAGER;
  wake();
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poke();
});

async function poll(mine: number): Promise<void> {
  while (mine === generation) {
    const began = Date.now();
    poked = false;
    try {
      const query = after ? `?after=${encodeURIComponent(after)}` : "";
      const answer = await ask<Live>(`/api/v1/live${query}`);
      if (mine !== generation) return;
      take(answer);
    } catch (error) {
      if (mine !== generation) return;
      if (error instanceof Problem && error.status < 500) {
        if (keyWanted.value !== null) return;
      }
      if (silentSince.value === null) silentSince.value = now();
    }
    const usual = Date.now() < eager ? SOON : VISIBLE;
    const pause = document.hidden ? HIDDEN : silentSince.value === null ? usual : 1_500;
    await new Promise<void>((done) => {
      const timer = setTimeout(done, pause);
      wake = () => {
        wake = () => {};
        clearTimeout(timer);
        // Many events at once are one question.
        setTimeout(done, Math.max(0, SOON - (Date.now() - began)));
      };
      if (poked && silentSince.value === null) wake();
    });
  }
}

function take(answer: Live): void {
  after = answer.after;
  setClock(answer.overview.now_ms);
  if (answer.complete) {
    locks.clear();
    lanes.clear();
  }
  for (const seen of answer.locks) locks.set(seen.name, seen);
  for (const name of answer.gone) locks.delete(name);
  for (const tenure of answer.tenures) lane(tenure.name).tenures.set(tenure.holder_id, tenure);
  for (const wait of answer.waits) lane(wait.name).waits.set(wait.ticket, wait);
  forget();
  const changed = answer.complete || answer.locks.length + answer.gone.length + answer.tenures.length + answer.waits.length > 0;
  batch(() => {
    overview.value = answer.overview;
    silentSince.value = null;
    if (changed) changes.value += 1;
  });
}

function lane(name: string): Lane {
  let found = lanes.get(name);
  if (!found) {
    found = { tenures: new Map(), waits: new Map() };
    lanes.set(name, found);
  }
  return found;
}

let forgotten = 0;

/** What ended more than an hour ago, once a minute. */
function forget(): void {
  const limit = now() - HOUR;
  if (limit - forgotten < 60_000) return;
  forgotten = limit;
  for (const [name, { tenures, waits }] of lanes) {
    for (const [id, { ended_ms }] of tenures) if (ended_ms !== null && ended_ms < limit) tenures.delete(id);
    for (const [id, { ended_ms }] of waits) if (ended_ms !== null && ended_ms < limit) waits.delete(id);
    if (tenures.size + waits.size === 0) lanes.delete(name);
  }
}

/** Reads with `fetch`, because an `EventSource` could send the key only in the address. */
async function follow(mine: number): Promise<void> {
  // No server gave this id, so it tells all it still knows: what happened before somebody looked.
  let last = "begin";
  let pause = 500;
  while (mine === generation) {
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), SILENT);
    try {
      const asked = key.value;
      const more = { "Last-Event-ID": last };
      const response = await fetch("/api/v1/events", { headers: headers(more), cache: "no-store", signal: silence.signal });
      if (!response.ok || !response.body) {
        await refusal(response, asked);
        if (keyWanted.value !== null) return;
        throw new Error("no stream");
      }
      streaming.value = true;
      pause = 500;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done || mine !== generation) break;
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENT);
        text += value;
        const blocks = text.split("\n\n");
        text = blocks.pop() ?? "";
        for (const block of blocks) last = told(block) || last;
      }
      void reader.cancel().catch(() => {});
    } catch {
      // Told by the dot that goes grey.
    }
    clearTimeout(timer);
    if (mine !== generation) return;
    streaming.value = false;
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(pause * 2, 5_000);
  }
}

/** One event of the stream; answers its id. */
function told(block: string): string {
  let id = "";
  let kind = "";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("id: ")) id = line.slice(4);
    else if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (!kind) return id;
  poke();
  if (kind === "gap") return id;
  try {
    const event = JSON.parse(data);
    if (event.name === OURS && kind !== "alert") return id;
    const alert = kind === "alert";
    const happened: Happened = {
      id,
      kind: alert ? `alert ${event.state ?? ""}` : kind,
      name: event.name ?? null,
      owner: event.owner ?? null,
      at_ms: (alert ? (event.resolved_ms ?? event.last_ms) : event.at_ms) ?? now(),
      // Its whole text stands among the alerts.
      reason: alert ? String(event.type ?? "").replaceAll("_", " ") : (event.reason ?? ""),
    };
    list(happened);
    if (alert && now() - happened.at_ms < 10_000) void refresh("/api/v1/alerts", (answer: { alerts: Alert[] } | null) => {
      if (answer) alerts.value = answer.alerts;
    });
  } catch {
    // Of a newer server: not understood, and no reason to stop.
  }
  return id;
}

function list(happened: Happened): void {
  unlisted.unshift(happened);
  if (unlisted.length > FEED) unlisted.length = FEED;
  if (unlisted.length > 1) return;
  setTimeout(() => {
    const listed = unlisted;
    unlisted = [];
    feed.value = [...listed, ...feed.value].slice(0, FEED);
  }, SOON);
}

/** What not every server has: asked for now and then, and hidden where there is no such route. */
async function every<T>(mine: number, ms: number, path: string, set: (answer: T | null) => void): Promise<void> {
  while (mine === generation) {
    let pause = ms;
    if (!document.hidden && keyWanted.value === null) {
      const there = await refresh(path, (answer: T | null) => {
        if (mine === generation) set(answer);
      });
      if (!there) pause = 60_000;
    }
    await new Promise((done) => setTimeout(done, pause));
  }
}

async function refresh<T>(path: string, set: (answer: T | null) => void): Promise<boolean> {
  try {
    set(await ask<T>(path));
  } catch (error) {
    if (error instanceof Problem && error.status === 404) {
      set(null);
      return false;
    }
    // Else what was known stays.
  }
  return true;
}
