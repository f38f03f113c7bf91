// Ask a model of a server that this program starts and ends: node sidecar_client.mjs [PROMPT]. Needs node 20, no package.
// STATICLLM names the command that starts it, for example that of a virtual environment, or the one that an application ships.
import { spawn } from "node:child_process";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";

const [command, ...first] = (process.env.STATICLLM ?? "staticllm").split(" ");

export class Sidecar {
  // Start a server of this program's own, which ends with it, also if it is killed.
  static async start(...given) {
    const folder = await mkdtemp(`${tmpdir()}/sidecar-`);
    const file = `${folder}/ready.json`;
    const own = ["serve", "--port", "0", "--random-key", "--ready-file", file, "--parent-pid", String(process.pid)];
    const child = spawn(command, [...first, ...own, ...given], { stdio: ["ignore", "ignore", "pipe"] });
    let log = "";
    child.stderr.setEncoding("utf8").on("data", (text) => (log = (log + text).slice(-4000)));
    child.on("error", (error) => (log += error.message));
    while (child.exitCode === null && child.pid !== undefined) {
      const text = await readFile(file, "utf8").catch(() => null);
      if (text !== null) return Object.assign(new Sidecar(), { folder, child, ready: JSON.parse(text) });
      await new Promise((done) => setTimeout(done, 50));
    }
    await rm(folder, { recursive: true });
    throw new Error(log.trim().split("\n").at(-1) || `exit code ${child.exitCode}`);
  }

  // Yield the pieces of an answer; leaving the loop stops the answer.
  async *chat(messages, options = {}) {
    const headers = { "Authorization": `Bearer ${this.ready.key}`, "Content-Type": "application/json" };
    const body = JSON.stringify({ messages, stream: true, ...options });
    const response = await fetch(`${this.ready.url}/chat/completions`, { method: "POST", headers, body });
    if (!response.ok) throw new Error((await response.json()).error.message);
    let rest = "";
    for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
      const lines = (rest + text).split("\n");
      rest = lines.pop();
      for (const line of lines.filter((each) => each.startsWith("data: {"))) {
        const { error, choices } = JSON.parse(line.slice(6));
        if (error) throw new Error(error.message);
        yield choices.map((choice) => choice.delta.content ?? "").join("");
      }
    }
  }

  async close() {
    this.child.kill();
    if (this.child.exitCode === null && this.child.signalCode === null) await new Promise((done) => this.child.once("exit", done));
    await rm(this.folder, { recursive: true });
  }
}

const sidecar = await Sidecar.start();
try {
  const content = process.argv.slice(2).join(" ") || "What is an NPU?";
  for await (const piece of sidecar.chat([{ role: "user", content }], { max_tokens: 64 })) process.stdout.write(piece);
  console.log();
} finally {
  await sidecar.close();
}
