// Some workers that share some locks, for the pictures: one is revoked, one forced out, one lease runs out.
import { sleep } from "./support.mjs";

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

/** Goes on until the place ends. */
export function lively(place) {
  // The same each time: no more chance than it needs to look alive.
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
