// Starts a server with its own store, processes with locks, and a browser.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import net from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

export const root = join(dirname(fileURLToPath(import.meta.url)), "../..");
const target = process.env.CARGO_TARGET_DIR ?? join(root, "target");
const program = process.env.LEASEHOLD_PROGRAM ?? join(target, "debug/leasehold");
const browserPath = process.env.LEASEHOLD_CHROMIUM ?? "/usr/bin/chromium";

export const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

/** The timeout of waits that are not measured, generous for slow machines. */
export const PATIENCE = 60_000;

/** Waits until a condition is true. */
export async function until(what, look, within = PATIENCE) {
  const end = Date.now() + within;
  for (;;) {
    const found = await look();
    if (found) return found;
    if (Date.now() > end) throw new Error(`not within ${within} ms: ${what}`);
    await sleep(25);
  }
}

const undoing = new WeakMap();

/** Runs the cleanups of a test in reverse order, however it ends. */
function later(test, undo) {
  if (!undoing.has(test)) {
    undoing.set(test, []);
    test.after(async () => {
      for (const undo of undoing.get(test).reverse()) await undo();
    });
  }
  undoing.get(test).push(undo);
}

/** A store, a server and processes that use them; `end` stops all of them. */
export class Place {
  children = new Set();
  over = false;
  dir = mkdtempSync(join(tmpdir(), "leasehold-page-"));

  static async start(test, { store, args = [] } = {}) {
    if (!existsSync(program)) throw new Error(`there is no ${program}: cargo build -p leasehold-cli --all-features`);
    const place = new Place();
    later(test, () => place.end());
    place.store = store ?? `sqlite:${join(place.dir, "locks.db")}`;
    await place.serve("127.0.0.1:0", args);
    return place;
  }

  /** Starts the server. Throws its error if it exits. */
  async serve(listen, args = []) {
    const server = this.spawn(["serve", "--json", "--listen", listen, "--audit", join(this.dir, "audit.jsonl"), ...args]);
    this.server = server;
    const [line] = await until("the server says where it is", () => /^.*\n/.exec(server.out) ?? (server.exitCode === null ? null : [""]));
    if (!line) throw new Error(`the server ended with ${server.exitCode}: ${server.errors}`);
    this.url = JSON.parse(line).url;
  }

  spawn(args, options = {}) {
    const inherited = Object.entries(process.env).filter(([name]) => !name.startsWith("LEASEHOLD_"));
    const store = this.store ? { LEASEHOLD_STORE: this.store } : {};
    const env = { ...Object.fromEntries(inherited), ...store, XDG_STATE_HOME: this.dir, NO_COLOR: "1", RUST_LOG: "error", ...options.env };
    const child = spawn(program, args, { env, stdio: ["ignore", "pipe", "pipe"], cwd: this.dir });
    child.out = child.errors = "";
    child.stdout.on("data", (text) => (child.out += text));
    child.stderr.on("data", (text) => (child.errors += text));
    this.children.add(child);
    child.ended = once(child, "exit").then(() => this.children.delete(child));
    return child;
  }

  /** Runs `leasehold ARGS` and returns its output. */
  async run(args) {
    const child = this.spawn(args);
    await once(child, "close");
    if (child.exitCode !== 0) throw new Error(`leasehold ${args.join(" ")}: ${child.exitCode} ${child.errors}`);
    return child.out;
  }

  /** Starts a process that waits for a lock and holds it until it is stopped. */
  hold(name, owner, seconds = 600, ttl = "30s") {
    return this.spawn(["run", "--owner", owner, "--ttl", ttl, name, "--", "sleep", String(seconds)]);
  }

  async stop(child, signal = "SIGTERM") {
    child.kill(signal);
    await child.ended;
  }

  async get(path, headers = {}) {
    const response = await fetch(this.url + path, { headers });
    return response.json();
  }

  async post(path, body, headers = {}) {
    const response = await fetch(this.url + path, { method: "POST", headers: { "Content-Type": "application/json", ...headers }, body: JSON.stringify(body) });
    return { status: response.status, body: await response.json() };
  }

  lock(name) {
    return this.get(`/api/v1/locks/${encodeURIComponent(name)}`);
  }

  async end() {
    this.over = true;
    const children = [...this.children];
    for (const child of children) child.kill();
    const all = Promise.all(children.map((child) => child.ended));
    const late = setTimeout(() => children.forEach((child) => child.kill("SIGKILL")), 8_000);
    await all;
    clearTimeout(late);
    rmSync(this.dir, { recursive: true, force: true });
  }
}

/** A Redis server of a test. */
export class Redis {
  static async start(test) {
    const redis = new Redis();
    redis.dir = mkdtempSync(join(tmpdir(), "leasehold-redis-"));
    later(test, async () => {
      await redis.stop();
      rmSync(redis.dir, { recursive: true, force: true });
    });
    do {
      redis.port = await new Promise((done) => {
        const probe = net.createServer().listen(0, "127.0.0.1", () => {
          const { port } = probe.address();
          probe.close(() => done(port));
        });
      });
      // Another process may have taken the port.
    } while (!(await redis.again()));
    redis.url = `redis://127.0.0.1:${redis.port}`;
    return redis;
  }

  /** Whether the server is up; false if the port is taken. */
  async again() {
    const child = spawn("redis-server", ["--port", String(this.port), "--bind", "127.0.0.1", "--dir", this.dir, "--save", "", "--appendonly", "no"], { stdio: "ignore" });
    this.child = child;
    await once(child, "spawn");
    const gone = () => child.exitCode !== null || child.signalCode !== null;
    await until("redis answers", async () => gone() || (await this.say("INFO server").catch(() => "")).includes(`process_id:${child.pid}`));
    return !gone();
  }

  async say(line) {
    const socket = net.connect(this.port, "127.0.0.1");
    socket.setEncoding("utf8");
    try {
      await once(socket, "connect");
      socket.write(`${line}\r\n`);
      const [answer] = await once(socket, "data");
      return answer;
    } finally {
      socket.destroy();
    }
  }

  async stop() {
    const { child } = this;
    if (child && child.exitCode === null && child.signalCode === null) {
      child.kill("SIGKILL");
      await once(child, "exit");
    }
  }
}

export async function browser() {
  return chromium.launch({
    executablePath: browserPath,
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"],
  });
}

/** A page that records policy violations, errors and requests to other hosts. */
export async function openPage(chrome, url, options = {}) {
  const { hash = "", script, ...look } = options;
  const context = await chrome.newContext({ viewport: { width: 1440, height: 900 }, colorScheme: "light", ...look });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  if (script) await page.addInitScript(script);
  const seen = { violations: [], errors: [], foreign: [] };
  page.on("console", (message) => {
    const text = message.text();
    if (/Content Security Policy|Trusted ?Type/i.test(text)) seen.violations.push(text);
    else if (message.type() === "error" && !/Failed to load resource/.test(text)) seen.errors.push(text);
  });
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("request", (request) => {
    if (!request.url().startsWith(url)) seen.foreign.push(request.url());
  });
  page.seen = seen;
  page.begun = Date.now();
  await page.goto(`${url}/${hash}`, { waitUntil: "commit" });
  return page;
}

/** The row of a lock in the table. */
export const row = (page, name) => page.locator(".grid .body .row").filter({ has: page.locator(".cell.name .text", { hasText: new RegExp(`^${name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`) }) });

/** Expects no violations, errors or foreign requests. */
export function clean(page) {
  const { violations, errors, foreign } = page.seen;
  if (violations.length + errors.length + foreign.length > 0) throw new Error(JSON.stringify(page.seen, null, 2));
}
