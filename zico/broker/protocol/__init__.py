"""The broker's protocol: messages, frames and states. Bytes in, events out; no sockets."""
