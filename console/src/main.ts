import { mount } from "svelte";
import App from "./App.svelte";
import "./app.css";
import { showTheme } from "./lib/theme.svelte";

showTheme();
const target = document.getElementById("app")!;
target.replaceChildren();
mount(App, { target });
