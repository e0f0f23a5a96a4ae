// The API client. The key is stored for this tab only and sent as a header, never in a URL.
import { signal } from "@preact/signals";

export interface Waiter {
  owner: string;
  ticket: number;
  waiting_ms: number;
}

/** A lock, with the fields of `leasehold --json`. */
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

/** A lock and the time of the observation. */
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

/** An error response: a code for programs, a sentence for people. */
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

/** The user's key; empty if there is none. */
export const key = signal(stored());
/** Why the login form is shown; `null` if no key is needed. */
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
    // Storage is blocked: the key is lost when the page is closed.
  }
}

export function headers(more: Record<string, string> = {}): Record<string, string> {
  return key.value ? { ...more, Authorization: `Bearer ${key.value}` } : more;
}

export async function request<T>(path: string, body?: unknown): Promise<T> {
  const sentKey = key.value;
  const type: Record<string, string> = body === undefined ? {} : { "Content-Type": "application/json" };
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers: headers(type),
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
  });
  if (response.ok) return (await response.json()) as T;
  throw await toProblem(response, sentKey);
}

export async function toProblem(response: Response, sentKey: string): Promise<Problem> {
  let json: { code?: string; message?: string; owner?: string; holder_id?: string } = {};
  try {
    json = await response.json();
  } catch {
    // Not JSON: the response of a proxy.
  }
  const message = json.message ?? `the server answered ${response.status}`;
  const problem = new Problem(response.status, json.code ?? "unknown", message, json.owner, json.holder_id);
  // Ignore the response to an older key.
  if ((response.status === 401 || response.status === 429) && sentKey === key.value) {
    keyWanted.value = problem.code === "no_key" ? "" : problem.message;
  }
  return problem;
}

export const lockPath = (name: string) => `/api/v1/locks/${encodeURIComponent(name)}`;
