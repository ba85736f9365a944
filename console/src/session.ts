/** The page of `tugline view --html`: a session in one file, with its data in the element `data`. */
import { mount } from "svelte";
import "./app.css";
import { decodeRecording } from "./lib/recording";
import { showTheme } from "./lib/theme.svelte";
import SessionFile from "./pages/SessionFile.svelte";

showTheme();
const target = document.getElementById("app")!;

async function open(): Promise<void> {
  const text = atob(document.getElementById("data")!.textContent.trim());
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const recording = await decodeRecording(new Blob([packed]));
  performance.mark("data decoded");
  mount(SessionFile, { target, props: { recording } });
}

open().catch((error: Error) => {
  target.replaceChildren(`This page cannot be shown: ${error.message}`);
  throw error;
});
