// Reads server-sent events from a fetched body. (An EventSource can send neither a key nor a POST.)

/** The events of a response as { event, data }; empty lines between them as { event: "idle" }. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const whole of lines) {
        const line = whole.endsWith("\r") ? whole.slice(0, -1) : whole;
        if (line === "") {
          yield data.length ? { event, data: data.join("\n") } : { event: "idle", data: "" };
          event = "message";
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line.startsWith("event:")) {
          event = line.slice(6).trim();
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a caller that stops reading closes the connection
  }
}
