/** Results of the training sessions of a run, summed by version while they arrive. */
import { get } from "./api";
import { Sums, type VersionFigures } from "./figures";
import { listen } from "./live.svelte";

const PAGE = 1000;
const TASKS = 200;
const REST_MS = 1000;
/** As the trainer tags the tasks of its evaluations. */
const HELD_OUT_TAG = "held_out=true";

export class TrainingResults {
  versions = $state.raw<VersionFigures[]>([]);
  /** Results of training sessions, and those of held-out ones, which are in no version. */
  counted = $state(0);
  heldOut = $state(0);
  phase = $state<"reading" | "done" | "failed">("reading");
  #tasks = new Set<string>();
  #seen = new Set<string>();

  /** Create in a component. `run` is the name of the run; undefined: all sessions of the server; null: none yet. */
  constructor(run: () => string | undefined | null) {
    $effect(() => {
      const name = run();
      if (name !== null) return this.#follow(name);
    });
  }

  #follow(run: string | undefined): () => void {
    const stop = new AbortController();
    const sums = new Sums();
    let cursor = 0;
    let due = false;
    let busy = false;
    this.#tasks = new Set();
    this.#seen = new Set();
    [this.versions, this.counted, this.heldOut, this.phase] = [[], 0, 0, "reading"];
    const take = async () => {
      if (busy) return;
      busy = true;
      try {
        for (let more = true; more; ) {
          const query = { after: cursor, limit: PAGE, run };
          const page = await get("/v1/results", { query, signal: stop.signal });
          await this.#learn(page.items.map(({ task }) => task), run, stop.signal);
          const training = page.items.filter(({ task }) => !this.#tasks.has(task));
          sums.add(training);
          cursor = page.cursor;
          this.counted += training.length;
          this.heldOut += page.items.length - training.length;
          this.versions = sums.list();
          more = page.items.length === PAGE;
        }
        this.phase = "done";
      } catch {
        if (!stop.signal.aborted) this.phase = "failed";
      }
      busy = false;
    };
    void take();
    const timer = setInterval(() => due && ((due = false), void take()), REST_MS);
    const ignore = listen((event) => {
      if (event === null || event.kind === "session.result") due = true;
    });
    return () => {
      stop.abort();
      clearInterval(timer);
      ignore();
    };
  }

  /** Read which tasks are held out, newest first, up to those that are known, if `tasks` has new ones. */
  async #learn(tasks: readonly string[], run: string | undefined, signal: AbortSignal): Promise<void> {
    const fresh = tasks.filter((task) => !this.#seen.has(task));
    if (!fresh.length) return;
    const found: string[] = [];
    let after: string | undefined;
    do {
      const query = { newest: true, tag: HELD_OUT_TAG, run, limit: TASKS, after };
      const page = await get("/v1/tasks", { query, signal });
      const ids = (page.tasks ?? []).map(({ id }) => id);
      found.push(...ids);
      after = ids.some((id) => this.#tasks.has(id)) ? undefined : page.next ?? undefined;
    } while (after !== undefined);
    for (const id of found) this.#tasks.add(id);
    for (const id of fresh) this.#seen.add(id);
  }
}
