// Checks that the committed page in the server crate is the build of these sources.
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const carried = join(here, "../crates/leasehold-server/page");
const built = mkdtempSync(join(tmpdir(), "leasehold-build-"));
const run = (program, ...args) => execFileSync(join(here, "node_modules/.bin", program), args, { cwd: here, stdio: ["ignore", "ignore", "inherit"] });
const files = (dir) => readdirSync(dir, { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile()).map((entry) => join(entry.parentPath ?? entry.path, entry.name).slice(dir.length + 1)).sort();

try {
  run("tsc", "--noEmit");
  run("vite", "build", "--logLevel", "warn", "--outDir", built);
  const [ours, theirs] = [files(built), files(carried)];
  const differ = [...new Set([...ours, ...theirs])].filter((file) => !ours.includes(file) || !theirs.includes(file) || !readFileSync(join(built, file)).equals(readFileSync(join(carried, file))));
  if (differ.length > 0) {
    console.error(`crates/leasehold-server/page is out of date (${differ.join(", ")}): npm run build, and commit it`);
    process.exitCode = 1;
  } else {
    console.log(`the page is up to date: ${ours.length} files`);
  }
} finally {
  rmSync(built, { recursive: true, force: true });
}
