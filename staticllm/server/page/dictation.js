// Dictation: records the microphone, and puts into a field what the server's first speech model hears.

import { announce, setText } from "./dom.js";
import { transcribe } from "./server.js";

const RATE = 16000; // of all Whisper models
const MAX_MS = 10 * 60 * 1000;

/** A button that records while it is pressed in, and its field. */
export class Dictation {
  /** `clock` shows for how long it has been recording. */
  constructor(button, field, clock, { notify }) {
    this.button = button;
    this.clock = clock;
    this.field = field;
    this.notify = notify;
    this.recorder = null;
    this.model = null;
    button.addEventListener("click", () => this.toggle());
  }

  /** Show the button if there is a speech model and a way to record, which browsers offer to this machine and over HTTPS. */
  offer(model) {
    this.model = model;
    this.button.hidden = !model || !navigator.mediaDevices || !window.MediaRecorder;
  }

  async toggle() {
    if (this.recorder) return this.recorder.stop();
    this.button.disabled = true;
    try {
      await this.record();
    } catch (error) {
      const isRefused = error.name === "NotAllowedError";
      this.notify(isRefused ? "The browser does not allow this page to record." : "No microphone can be used.");
    }
    this.button.disabled = false;
  }

  async record() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    const parts = [];
    const recorder = new MediaRecorder(stream);
    const timer = setTimeout(() => recorder.stop(), MAX_MS);
    recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
    recorder.addEventListener("stop", () => {
      clearTimeout(timer);
      for (const track of stream.getTracks()) track.stop();
      this.recorder = null;
      this.show(false);
      this.write(new Blob(parts, { type: recorder.mimeType }));
    });
    recorder.start();
    this.recorder = recorder;
    this.show(true);
  }

  show(isRecording) {
    const label = isRecording ? "Stop dictating" : "Dictate";
    this.button.setAttribute("aria-pressed", String(isRecording));
    this.button.setAttribute("aria-label", label);
    this.button.title = label;
    this.clock.hidden = !isRecording;
    clearInterval(this.ticking);
    if (isRecording) {
      const begin = performance.now();
      const tick = () => {
        const seconds = Math.floor((performance.now() - begin) / 1000);
        setText(this.clock, `Recording ${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`);
      };
      tick();
      this.ticking = setInterval(tick, 500);
    }
    announce(isRecording ? "Recording." : "The recording has ended.");
  }

  /** Put the text of a recording where the cursor is. */
  async write(recording) {
    this.button.disabled = true;
    try {
      const text = await transcribe(await toWav(recording), this.model);
      if (text) this.insert(text);
      else this.notify("Nothing was heard.");
    } catch (error) {
      this.notify(error.message);
    }
    this.button.disabled = false;
  }

  insert(text) {
    const { selectionStart: start, selectionEnd: end, value } = this.field;
    const space = start > 0 && !/\s/.test(value[start - 1]) ? " " : "";
    this.field.setRangeText(space + text, start, end, "end");
    this.field.dispatchEvent(new Event("input"));
    this.field.focus();
  }
}

/** Return a recording as WAV: one channel, 16 bits, at the rate of the model. */
async function toWav(recording) {
  const context = new OfflineAudioContext(1, 1, RATE);
  const decoded = await context.decodeAudioData(await recording.arrayBuffer());
  const channels = Array.from({ length: decoded.numberOfChannels }, (_, index) => decoded.getChannelData(index));
  const view = new DataView(new ArrayBuffer(44 + 2 * decoded.length));
  const text = (at, value) => [...value].forEach((char, index) => view.setUint8(at + index, char.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * decoded.length, true);
  text(8, "WAVEfmt ");
  [16, 1 | (1 << 16), RATE, 2 * RATE, 2 | (16 << 16)].forEach((value, index) => view.setUint32(16 + 4 * index, value, true));
  text(36, "data");
  view.setUint32(40, 2 * decoded.length, true);
  for (let at = 0; at < decoded.length; at++) {
    const value = channels.reduce((sum, channel) => sum + channel[at], 0) / channels.length;
    view.setInt16(44 + 2 * at, Math.max(-1, Math.min(1, value)) * 32767, true);
  }
  return new Blob([view], { type: "audio/wav" });
}
