package stream

import (
	"bytes"
	"net"
	"testing"

	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/wire"
)

// script is a byte stream that counts its calls. Each read returns what is asked for, as far as available.
type script struct {
	net.Conn
	in            []byte
	reads, writes int
	into          [][]byte // memory of each read
}

func (s *script) Read(b []byte) (int, error) {
	n := copy(b, s.in)
	s.in, s.reads, s.into = s.in[n:], s.reads+1, append(s.into, b)
	return n, nil
}

func (s *script) WriteBuffers(buffers *net.Buffers) error {
	*buffers = nil
	s.writes++
	return nil
}

func (s *script) Close() error { return nil }

func (s *script) RemoteAddr() net.Addr { return &net.TCPAddr{} }

func TestAFrameTakesOneWriteAndASmallOneASingleRead(t *testing.T) {
	h := wire.Header{Type: wire.TypePush, Length: 1000}
	frame := append(h.Append(nil), make([]byte, h.Length)...)
	s := &script{in: bytes.Repeat(frame, 3)}
	c := newConn(s, &auth.Session{})
	for range 3 { // everything available is read at once
		if err := c.ReadHeader(&h); err != nil {
			t.Fatal(err)
		}
		if err := c.ReadPayload(make([]byte, h.Length)); err != nil {
			t.Fatal(err)
		}
		if err := c.Send(net.Buffers{frame[:wire.HeaderSize], frame[wire.HeaderSize:]}); err != nil {
			t.Fatal(err)
		}
	}
	if s.reads != 1 || s.writes != 3 {
		t.Errorf("3 small frames took %d reads and %d writes, want 1 and 3", s.reads, s.writes)
	}
}

func TestALargePayloadIsReadStraightIntoItsMemory(t *testing.T) {
	h := wire.Header{Type: wire.TypePush, Length: 1 << 20}
	s := &script{in: append(h.Append(nil), make([]byte, h.Length)...)}
	c := newConn(s, &auth.Session{})
	if err := c.ReadHeader(&h); err != nil {
		t.Fatal(err)
	}
	payload := make([]byte, h.Length)
	if err := c.ReadPayload(payload); err != nil {
		t.Fatal(err)
	}
	ahead := ReadAhead - wire.HeaderSize
	if s.reads != 2 || len(s.into[1]) != len(payload)-ahead || &s.into[1][0] != &payload[ahead] {
		t.Errorf("a payload of %d bytes took %d reads, want 2, the second of them into the payload itself", len(payload), s.reads)
	}
}

func TestFramesTakeNoMemory(t *testing.T) {
	h := wire.Header{Type: wire.TypePush, Length: 1000}
	frame := append(h.Append(nil), make([]byte, h.Length)...)
	s := &script{}
	c := newConn(s, &auth.Session{})
	payload, out := make([]byte, h.Length), make(net.Buffers, 2)
	n := testing.AllocsPerRun(100, func() {
		s.in, s.into = frame, s.into[:0]
		out[0], out[1] = frame[:wire.HeaderSize], frame[wire.HeaderSize:]
		if c.ReadHeader(&h) != nil || c.ReadPayload(payload) != nil || c.Send(out) != nil {
			t.Fatal("it failed")
		}
	})
	if n > 0 {
		t.Errorf("%v allocations to read a frame and send one", n)
	}
}

// eager is a script that takes every write at once.
type eager struct{ *script }

func (e eager) TryWrite(buffers net.Buffers) (n int, err error) {
	e.writes++
	for _, b := range buffers {
		n += len(b)
	}
	return n, nil
}

func TestBeatsTakeNoMemory(t *testing.T) {
	s := eager{&script{}}
	c := newConn(s, &auth.Session{})
	if n := testing.AllocsPerRun(100, c.beat); n > 0 || s.writes != 101 {
		t.Errorf("%v allocations for each of %d beats, want none for 101", n, s.writes)
	}
}
