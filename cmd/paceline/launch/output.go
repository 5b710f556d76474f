package launch

import (
	"bytes"
	"io"
	"sync"
	"time"
)

// Console is where the output of all processes comes together. Lines of different processes never mix.
type Console struct {
	Stdout, Stderr io.Writer
	Timestamps     bool // each line begins with the time

	mu sync.Mutex // held while lines are written
}

// A Stream is one output of one process: it writes every line with its prefix to the console, and
// unchanged to a file if there is one.
type Stream struct {
	console *Console
	out     io.Writer
	file    io.WriteCloser // or nil
	prefix  string
	held    []byte // the beginning of a line that has not ended yet
	inLine  bool   // the line's beginning was too long to hold and was written
}

// maxHeld bounds how much of a line waits for its end.
const maxHeld = 64 << 10

// Stream makes the stream of a process's stdout or stderr, with the prefix "[label]<stdout>:".
func (c *Console) Stream(label string, stderr bool, file io.WriteCloser) *Stream {
	if stderr {
		return &Stream{console: c, out: c.Stderr, file: file, prefix: "[" + label + "]<stderr>:"}
	}
	return &Stream{console: c, out: c.Stdout, file: file, prefix: "[" + label + "]<stdout>:"}
}

// Write accepts output and forwards the lines that have ended. It never fails: output that
// cannot be written must not stop the process that made it.
func (s *Stream) Write(p []byte) (int, error) {
	if s.file != nil {
		s.file.Write(p)
	}
	s.held = append(s.held, p...)
	lines := s.lines(nil)
	if len(s.held) > maxHeld {
		lines = s.begin(lines)
		lines = append(lines, s.held...)
		s.held = s.held[:0]
	}
	s.write(lines)
	return len(p), nil
}

// Close writes the rest of an unfinished line, ends it, and closes the file.
func (s *Stream) Close() {
	s.end("")
	if s.file == nil {
		return
	}
	if err := s.file.Close(); err != nil {
		s.end(err.Error())
	}
	s.file = nil
}

// end ends a line with what is held and some more, if there is any.
func (s *Stream) end(more string) {
	if len(s.held) == 0 && !s.inLine && more == "" {
		return
	}
	lines := append(append(s.begin(nil), s.held...), more...)
	s.held, s.inLine = nil, false
	s.write(append(lines, '\n'))
}

// lines moves the lines that have ended from held to out. A carriage return ends a line too, as
// progress bars have it, unless a line feed follows.
func (s *Stream) lines(out []byte) []byte {
	rest := s.held
	for {
		end := bytes.IndexAny(rest, "\r\n")
		if end < 0 || rest[end] == '\r' && end+1 == len(rest) {
			break
		}
		end++
		if rest[end-1] == '\r' && rest[end] == '\n' {
			end++
		}
		out = append(s.begin(out), rest[:end]...)
		rest, s.inLine = rest[end:], false
	}
	s.held = append(s.held[:0], rest...)
	return out
}

// begin writes the prefix, unless the line has begun.
func (s *Stream) begin(out []byte) []byte {
	if s.inLine {
		return out
	}
	s.inLine = true
	if s.console.Timestamps {
		out = time.Now().AppendFormat(out, time.ANSIC)
	}
	return append(out, s.prefix...)
}

func (s *Stream) write(lines []byte) {
	if len(lines) == 0 {
		return
	}
	s.console.mu.Lock()
	defer s.console.mu.Unlock()
	s.out.Write(lines)
}
