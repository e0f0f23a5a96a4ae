// What the server answers, and how it is asked. The key is kept for this tab only and is sent as a header: it never
// stands in an address.
import { signal } from "@preact/signals";

export interface Waiter {
  owner: string;
  ticket: number;
  waiting_ms: number;
}

/** A lock as `leasehold --json` says it. */
export interface Lock {
  name: string;
  held: boolean;
  owner: string | null;
  holder_id: string | null;
  fence: number | null;
  since_ms: number | null;
  held_ms: number | null;
  ttl_ms: number | null;
  ttl_left_ms: number | null;
  last_seen_ms: number | null;
  connected: boolean | null;
  revoked: boolean;
  foreign: boolean;
  waiters: Waiter[];
}

/** The same, and when it was looked at. */
export interface Seen extends Lock {
  at_ms: number;
}

export type End = "released" | "lost" | "revoked" | "forced" | "expired";

export interface Tenure {
  name: string;
  owner: string;
  holder_id: string;
  fence: number | null;
  since_ms: number;
  ended_ms: number | null;
  end: End | null;
  waited_ms: number | null;
  after: string | null;
}

export interface Wait {
  name: string;
  owner: string;
  ticket: number;
  since_ms: number;
  ended_ms: number | null;
}

export interface Point {
  at_ms: number;
  held: number;
  waiting: number;
  longest_wait_ms: number;
  handoffs: number;
  bad_ends: number;
}

export interface Overview {
  store: string;
  namespace: string;
  version: string;
  role: "viewer" | "operator";
  keyed: boolean;
  now_ms: number;
  looked_ms: number | null;
  status: "healthy" | "degraded" | "unhealthy";
  reasons: string[];
  store_down_since_ms: number | null;
  held: number;
  waiting: number;
  longest_wait_ms: number;
  handoffs_per_minute: number;
  bad_ends_last_hour: number;
  history: Point[];
  exception_stats: {
    normal_release_failures: number;
    emergency_releases: number;
    release_script_errors: number;
    ownership_violations: number;
    exception_rate: number;
    emergency_release_rate: number;
  };
}

export interface Live {
  after: string;
  complete: boolean;
  overview: Overview;
  locks: Seen[];
  gone: string[];
  tenures: Tenure[];
  waits: Wait[];
}

export interface Alert {
  id: string;
  type: string;
  level: "warning" | "critical";
  message: string;
  value: number | null;
  name: string | null;
  owner: string | null;
  holder_id: string | null;
  since_ms: number;
  last_ms: number;
  count: number;
  resolved_ms: number | null;
}

export interface Gpu {
  host: string | null;
  id: number | string;
  uuid: string | null;
  model: string | null;
  memory_total: number | null;
  memory_used: number | null;
  lock: Lock | null;
}

export interface Gpus {
  driver: string | null;
  message: string | null;
  gpus: Gpu[];
}

export interface Monitor {
  leader: boolean;
  leader_owner: string | null;
  enabled: boolean;
  auto_recovery: boolean;
  levels: { warning_ms: number; soft_ms: number; hard_ms: number };
}

export interface JournalEntry {
  id: string;
  kind: string;
  name: string;
  owner: string | null;
  at_ms: number;
  why: string | null;
  holder_id: string | null;
}

export interface AuditLine {
  at_ms: number;
  outcome: string;
  action: string;
  name: string;
  reason: string;
  who: string;
  key_id: string | null;
  holder_id: string | null;
  owner: string | null;
  fence: number | null;
}

export interface Evicted {
  name: string;
  outcome: "revoked" | "forced" | "free";
  released: boolean;
  owner: string | null;
  holder_id: string | null;
}

/** An answer that is no success: a code for programs, a sentence for people. */
export class Problem extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly owner: string | null = null,
    readonly holderId: string | null = null,
  ) {
    super(message);
  }
}

const KEY = "leasehold-key";

/** The key of whoever looks; empty where none was given. */
export const key = signal(stored());
/** Why a key is asked for; `null` while none is needed. */
export const keyWanted = signal<string | null>(null);

function stored(): string {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function remember(value: string): void {
  key.value = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Then it is kept until the page is closed.
  }
}

export function headers(more: Record<string, string> = {}): Record<string, string> {
  return key.value ? { ...more, Authorization: `Bearer ${key.value}` } : more;
}

export async function ask<T>(path: string, body?: unknown): Promise<T> {
  const asked = key.value;
  const json: Record<string, string> = body === undefined ? {} : { "Content-Type": "application/json" };
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers: headers(json),
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
  });
  if (response.ok) return (await response.json()) as T;
  throw await refusal(response, asked);
}

export async function refusal(response: Response, asked: string): Promise<Problem> {
  let said: { code?: string; message?: string; owner?: string; holder_id?: string } = {};
  try {
    said = await response.json();
  } catch {
    // Not from the server itself: a proxy.
  }
  const message = said.message ?? `the server answered ${response.status}`;
  const problem = new Problem(response.status, said.code ?? "unknown", message, said.owner, said.holder_id);
  // An answer to the key that was sent before somebody gave another one says nothing.
  if ((response.status === 401 || response.status === 429) && asked === key.value) {
    keyWanted.value = problem.code === "no_key" ? "" : problem.message;
  }
  return problem;
}

export const lockPath = (name: string) => `/api/v1/locks/${encodeURIComponent(name)}`;
