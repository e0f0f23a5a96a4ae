// The state of the page. It polls for changes twice a second, and at once when an event arrives.
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
  request,
  headers,
  key,
  keyWanted,
  toProblem,
} from "./api";
import { now, setClock } from "./time";

export interface Lane {
  tenures: Map<string, Tenure>;
  waits: Map<number, Wait>;
}

export interface FeedEvent {
  id: string;
  kind: string;
  name: string | null;
  owner: string | null;
  at_ms: number;
  reason: string;
}

/** Locks by name. Changed in place; `changes` is incremented with every change. */
export const locks = new Map<string, Seen>();
export const lanes = new Map<string, Lane>();
export const changes = signal(0);

export const overview = signal<Overview | null>(null);
/** Whether the event stream is open. */
export const streaming = signal(false);
/** When the server stopped answering. */
export const silentSince = signal<number | null>(null);
export const feed = signal<FeedEvent[]>([]);
/** `null` if the server does not have this route, or has not answered yet. */
export const alerts = signal<Alert[] | null>(null);
export const gpus = signal<Gpus | null>(null);
export const monitor = signal<Monitor | null>(null);

const HOUR = 3_600_000;
const VISIBLE = 500;
const HIDDEN = 5_000;
const FEED = 120;
/** The lock that elects the monitor. It is not a user's lock, so its events are hidden. */
const ELECTION = "leasehold-monitor";
/** The shortest interval between two polls and between two updates of the feed, so that many events do not block the page. */
const MIN_INTERVAL = 150;
const EAGER_FOR = 600;
/** A stream that is silent for this long is broken: the server sends a keep-alive every 15 s. */
const SILENCE_LIMIT = 40_000;
/** The warning level, or its default if the server does not report it. */
export const warningMs = (): number => monitor.value?.levels.warning_ms ?? 300_000;

let after = "";
let generation = 0;
let wake: () => void = () => {};
/** Whether an event has arrived since the last poll. */
let pollRequested = false;
/** Until when to poll often: the server's next scan will see the effects of an event. */
let eagerUntil = 0;
let pendingEvents: FeedEvent[] = [];

/** Starts polling and streaming, or restarts with another key. */
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
  pendingEvents = [];
  batch(() => {
    overview.value = null;
    streaming.value = false;
    silentSince.value = null;
    feed.value = [];
    alerts.value = gpus.value = monitor.value = null;
    changes.value += 1;
  });
}

/** Polls now instead of at the next interval. */
export function pollNow(): void {
  if (document.hidden) return;
  pollRequested = true;
  eagerUntil = Date.now() + EAGER_FOR;
  wake();
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) pollNow();
});

async function poll(mine: number): Promise<void> {
  while (mine === generation) {
    const began = Date.now();
    pollRequested = false;
    try {
      const query = after ? `?after=${encodeURIComponent(after)}` : "";
      const answer = await request<Live>(`/api/v1/live${query}`);
      if (mine !== generation) return;
      take(answer);
    } catch (error) {
      if (mine !== generation) return;
      if (error instanceof Problem && error.status < 500) {
        if (keyWanted.value !== null) return;
      }
      if (silentSince.value === null) silentSince.value = now();
    }
    const usual = Date.now() < eagerUntil ? MIN_INTERVAL : VISIBLE;
    const pause = document.hidden ? HIDDEN : silentSince.value === null ? usual : 1_500;
    await new Promise<void>((done) => {
      const timer = setTimeout(done, pause);
      wake = () => {
        wake = () => {};
        clearTimeout(timer);
        // Many events at once cause one poll.
        setTimeout(done, Math.max(0, MIN_INTERVAL - (Date.now() - began)));
      };
      if (pollRequested && silentSince.value === null) wake();
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

/** Forgets what ended more than an hour ago, once a minute. */
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

/** Reads the event stream with `fetch`, because `EventSource` could send the key only in the URL. */
async function follow(mine: number): Promise<void> {
  // An unknown id, so the server sends its whole backlog.
  let last = "begin";
  let pause = 500;
  while (mine === generation) {
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), SILENCE_LIMIT);
    try {
      const sentKey = key.value;
      const more = { "Last-Event-ID": last };
      const response = await fetch("/api/v1/events", { headers: headers(more), cache: "no-store", signal: silence.signal });
      if (!response.ok || !response.body) {
        await toProblem(response, sentKey);
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
        timer = setTimeout(() => silence.abort(), SILENCE_LIMIT);
        text += value;
        const blocks = text.split("\n\n");
        text = blocks.pop() ?? "";
        for (const block of blocks) last = handleEvent(block) || last;
      }
      void reader.cancel().catch(() => {});
    } catch {
      // The live indicator turns grey.
    }
    clearTimeout(timer);
    if (mine !== generation) return;
    streaming.value = false;
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(pause * 2, 5_000);
  }
}

/** Handles one event of the stream. Returns its id. */
function handleEvent(block: string): string {
  let id = "";
  let kind = "";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("id: ")) id = line.slice(4);
    else if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (!kind) return id;
  pollNow();
  if (kind === "gap") return id;
  try {
    const event = JSON.parse(data);
    if (event.name === ELECTION && kind !== "alert") return id;
    const alert = kind === "alert";
    const entry: FeedEvent = {
      id,
      kind: alert ? `alert ${event.state ?? ""}` : kind,
      name: event.name ?? null,
      owner: event.owner ?? null,
      at_ms: (alert ? (event.resolved_ms ?? event.last_ms) : event.at_ms) ?? now(),
      // The alert list has the full message.
      reason: alert ? String(event.type ?? "").replaceAll("_", " ") : (event.reason ?? ""),
    };
    addToFeed(entry);
    if (alert && now() - entry.at_ms < 10_000) void refresh("/api/v1/alerts", (answer: { alerts: Alert[] } | null) => {
      if (answer) alerts.value = answer.alerts;
    });
  } catch {
    // Ignore an event of a newer server.
  }
  return id;
}

function addToFeed(entry: FeedEvent): void {
  pendingEvents.unshift(entry);
  if (pendingEvents.length > FEED) pendingEvents.length = FEED;
  if (pendingEvents.length > 1) return;
  setTimeout(() => {
    const events = pendingEvents;
    pendingEvents = [];
    feed.value = [...events, ...feed.value].slice(0, FEED);
  }, MIN_INTERVAL);
}

/** Polls an optional route, and hides its panel if the server does not have it. */
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
    set(await request<T>(path));
  } catch (error) {
    if (error instanceof Problem && error.status === 404) {
      set(null);
      return false;
    }
    // On any other error the last known state stays.
  }
  return true;
}
