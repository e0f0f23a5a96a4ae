// Test data: a static scene for checks, and a lively one for the screenshots.
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { Place, Redis, sleep, until } from "./support.mjs";

/**
 * A static scene with everything the page can show: a lock with waiters, a foreign lock, a revoked lock, tenures with
 * each of the five ends, alerts, a journal entry and audit lines.
 */
export async function still(test) {
  const redis = await Redis.start(test);
  const place = await Place.start(test, { store: redis.url });
  const holds = (name, owner) => until(`${owner} holds ${name}`, async () => (await place.lock(name)).owner?.startsWith(owner));
  const acquire = (name, owner, ttl_ms) => place.post(`/api/v1/locks/${encodeURIComponent(name)}/acquire`, { ttl_ms, owner });
  const take = async (name, owner, ttl) => {
    const holder = place.hold(name, owner, 3_600, ttl);
    await holds(name, owner);
    return holder;
  };
  /** A lease that ends before a scan has seen it has an unknown end. */
  const seen = (name) => until(`${name} is in the picture`, async () => (await place.get("/api/v1/timeline")).tenures.some((tenure) => tenure.name === name));
  const ended = (name, how) => until(`${name} ended: ${how}`, async () => (await place.get("/api/v1/timeline")).tenures.some((tenure) => tenure.name === name && tenure.end === how));
  const evict = async (name, mode, reason) => {
    await seen(name);
    const { holder_id } = await place.lock(name);
    const { status, body } = await place.post(`/api/v1/locks/${encodeURIComponent(name)}/evict`, { holder_id, mode, reason });
    if (status !== 200) throw new Error(JSON.stringify(body));
  };
  // An entry of another store, which is not replayed: it stays until it is settled.
  const journal = join(place.dir, "leasehold/journal");
  mkdirSync(journal, { recursive: true });
  const entry = { id: "1-a", kind: "unreleased", name: "gpu_lock:3", store: "redis://elsewhere:6379", namespace: "leasehold", owner: "tts-worker-9@gpu-b (pid 77)", holder_id: "7f3a91c2b04d", fence: 7, ttl_ms: 600_000, at_ms: Date.now() - 60_000, why: "the store cannot be reached", token: "x" };
  writeFileSync(join(journal, "1-a.json"), JSON.stringify(entry));
  await redis.say("SET gpu_lock:7 some-other-client NX PX 36000000");

  await Promise.all([
    (async () => {
      await take("gpu_lock:0", "tts-worker-1");
      place.hold("gpu_lock:0", "ocr-worker-1", 3_600);
      await until("the first waits", async () => (await place.lock("gpu_lock:0")).waiters.length === 1);
      place.hold("gpu_lock:0", "whisper-1", 3_600);
      await until("both wait", async () => (await place.lock("gpu_lock:0")).waiters.length === 2);
    })(),
    take("db-backup", "backup"),
    (async () => {
      await acquire("release-train", "deploy.rb", 36_000_000);
      await evict("release-train", "revoke", "the release is called off");
    })(),
    (async () => {
      await take("search-index", "indexer-a");
      await evict("search-index", "revoke", "stuck on a bad page");
      await ended("search-index", "revoked");
    })(),
    (async () => {
      await take("mail-queue", "mailer");
      await evict("mail-queue", "force", "its host is gone");
      await ended("mail-queue", "forced");
    })(),
    (async () => {
      await take("gpu_lock:1", "whisper-2", "3s");
      await seen("gpu_lock:1");
      await redis.say("DEL gpu_lock:1");
      await ended("gpu_lock:1", "lost");
    })(),
    until("a lease ran out", async () => {
      const known = (await place.get("/api/v1/timeline")).tenures.filter(({ name }) => name === "crawl-budget");
      if (known.some(({ end }) => end === "expired")) return true;
      // Repeat if the server missed the tenure or its end.
      const over = known.every(({ ended_ms }) => ended_ms !== null && ended_ms < Date.now() - 8_000);
      if (over && !(await place.lock("crawl-budget")).held) await acquire("crawl-budget", "crawler", 2_000);
      return false;
    }),
    (async () => {
      const report = await take("report", "nightly-report");
      await seen("report");
      await place.stop(report, "SIGINT");
      await ended("report", "released");
    })(),
    until("what is the matter is known", async () => (await place.get("/api/v1/alerts")).alerts.filter(({ resolved_ms }) => resolved_ms === null).length >= 2),
  ]);
  return place;
}

// Workers that share locks: one is revoked, one forced out, one lease expires.

const WORKERS = [
  ["tts-worker-1", ["gpu_lock:0"], 8, 15],
  ["tts-worker-2", ["gpu_lock:0"], 6, 11],
  ["ocr-worker-1", ["gpu_lock:0", "gpu_lock:1"], 5, 10],
  ["whisper-1", ["gpu_lock:1"], 9, 16],
  ["whisper-2", ["gpu_lock:1"], 6, 12],
  ["billing", ["order:4711", "order:4712"], 2, 5],
  ["checkout", ["order:4711"], 1, 4],
  ["indexer-a", ["search-index"], 12, 18],
  ["indexer-b", ["search-index"], 8, 12],
  ["mailer", ["mail-queue"], 3, 6],
  ["backup", ["db-backup"], 200, 201],
  ["nightly-report", ["report"], 20, 30],
];

/** Runs until the test ends. */
export function lively(place) {
  // The same sequence every time.
  let seed = 7;
  const chance = () => {
    seed = (seed * 48_271) % 2_147_483_647;
    return seed / 2_147_483_647;
  };
  const work = async ([owner, names, least, most]) => {
    await sleep(chance() * 1_500);
    while (!place.over) {
      const name = names[Math.floor(chance() * names.length)];
      const seconds = least + chance() * (most - least);
      await place.spawn(["run", "--owner", owner, "--ttl", "20s", name, "--", "sleep", seconds.toFixed(1)]).ended;
      if (!place.over) await sleep(200 + chance() * 2_500);
    }
  };
  const evict = async (name, mode, reason) => {
    const { holder_id } = await place.lock(name);
    if (holder_id) await place.post(`/api/v1/locks/${encodeURIComponent(name)}/evict`, { holder_id, mode, reason });
  };
  const trouble = async () => {
    await sleep(5_000);
    while (!place.over) {
      await place.post("/api/v1/locks/crawl-budget/acquire", { ttl_ms: 7_000, owner: "crawler" });
      await sleep(9_000);
      if (place.over) return;
      await evict("search-index", "revoke", "stuck on a bad page");
      await sleep(12_000);
      if (place.over) return;
      await evict("mail-queue", "force", "its host is gone");
      await sleep(6_000);
    }
  };
  for (const worker of WORKERS) work(worker).catch(() => {});
  trouble().catch(() => {});
}
