package stream

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"testing"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/wire"
)

// sessions are what a handshake gives its two ends.
func sessions(t testing.TB, level auth.Level) (client, server *auth.Session) {
	t.Helper()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	keys := auth.Keys{Secret: []byte("the secret of the job"), Level: level}
	done := make(chan error, 1)
	go func() {
		var err error
		client, err = keys.Client(a, "server:1")
		done <- err
	}()
	server, err := keys.Server(b, "client:1")
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	return client, server
}

// recorder is a byte stream that keeps what is written.
type recorder struct {
	script
	out bytes.Buffer
}

func (r *recorder) WriteBuffers(buffers *net.Buffers) error {
	for _, b := range *buffers {
		r.out.Write(b)
	}
	*buffers = nil
	return nil
}

// sample is a few frames of every kind of payload, and what they look like on the stream.
func sample(size int) (frames []wire.Header, plain []byte) {
	for i, h := range []wire.Header{
		{Type: wire.TypeControl, Length: uint32(size)}, {Type: wire.TypeBye}, {Type: wire.TypePush, Length: uint32(size)},
		{Type: wire.TypePut, Flags: wire.FlagAuthenticated, Length: uint32(size)}, {Type: wire.TypeJoin},
	} {
		h.Seq = uint64(i)
		frames = append(frames, h)
		plain = append(h.Append(plain), bytes.Repeat([]byte{byte(i + 1)}, int(h.Length))...)
	}
	return frames, plain
}

func TestTagsDoNotDependOnThePiecesThatFramesComeIn(t *testing.T) {
	for _, size := range []int{0, 1, 100, wire.ChunkBytes, 2*wire.ChunkBytes + 77} {
		for _, level := range []auth.Level{auth.Control, auth.All} {
			client, server := sessions(t, level)
			frames, plain := sample(size)
			seed := rand.Uint64()
			random := rand.New(rand.NewPCG(seed, 0))
			r := &recorder{}
			c := newConn(r, client)
			for from := plain; len(from) > 0; {
				var pieces net.Buffers
				for range random.IntN(5) {
					n := min(random.IntN(1+random.IntN(2*size+100)), len(from))
					pieces, from = append(pieces, from[:n]), from[n:]
				}
				if err := c.Send(pieces); err != nil {
					t.Fatal(err)
				}
			}
			in := newConn(&script{in: r.out.Bytes()}, server)
			for i, want := range frames {
				var h wire.Header
				if err := in.ReadHeader(&h); err != nil || h != want {
					t.Fatalf("seed %d, size %d: frame %d is %+v (%v), want %+v", seed, size, i, h, err, want)
				}
				payload := make([]byte, h.Length)
				for left := payload; len(left) > 0; {
					n := 1 + random.IntN(len(left))
					if err := in.ReadPayload(left[:n]); err != nil {
						t.Fatalf("seed %d, size %d: frame %d: %v", seed, size, i, err)
					}
					left = left[n:]
				}
				if !bytes.Equal(payload, bytes.Repeat([]byte{byte(i + 1)}, len(payload))) {
					t.Fatalf("seed %d, size %d: frame %d arrived with other bytes", seed, size, i)
				}
			}
		}
	}
}

func TestNoBitOfAStreamCanBeChanged(t *testing.T) {
	client, server := sessions(t, auth.All)
	r := &recorder{}
	frames, plain := sample(20)
	if err := newConn(r, client).Send(net.Buffers{plain}); err != nil {
		t.Fatal(err)
	}
	sent := r.out.Bytes()
	for bit := range 8 * len(sent) {
		changed := bytes.Clone(sent)
		changed[bit/8] ^= 1 << (bit % 8)
		c := newConn(&script{in: changed}, server)
		for i := 0; ; i++ {
			var h wire.Header
			err := c.ReadHeader(&h)
			payload := make([]byte, h.Length)
			if err == nil {
				err = c.ReadPayload(payload)
			}
			if errors.Is(err, transport.ErrIntegrity) {
				break
			}
			if err != nil || i == len(frames) || h != frames[i] || !bytes.Equal(payload, bytes.Repeat([]byte{byte(i + 1)}, len(payload))) {
				t.Fatalf("bit %d: frame %d came as %+v, error %v", bit, i, h, err)
			}
		}
	}
}

func TestNoPrefixOfAStreamHasAFrameMore(t *testing.T) {
	client, server := sessions(t, auth.All)
	r := &recorder{}
	_, plain := sample(20)
	if err := newConn(r, client).Send(net.Buffers{plain}); err != nil {
		t.Fatal(err)
	}
	for n := range r.out.Len() {
		c := newConn(&ending{script{in: r.out.Bytes()[:n]}}, server)
		var h wire.Header
		var err error
		for err == nil {
			if err = c.ReadHeader(&h); err == nil {
				err = c.ReadPayload(make([]byte, h.Length))
			}
		}
		if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("%d bytes: error %v", n, err)
		}
	}
}

// ending is a script with an end.
type ending struct{ script }

func (e *ending) Read(b []byte) (int, error) {
	if len(e.in) == 0 {
		return 0, io.EOF
	}
	return e.script.Read(b)
}

func TestTaggedFramesTakeNoMemory(t *testing.T) {
	client, server := sessions(t, auth.All)
	h := wire.Header{Type: wire.TypeBatch, Length: 1000}
	header, payload := h.Append(nil), make([]byte, h.Length)
	r := &recorder{}
	out, in := newConn(r, client), newConn(r, server)
	buffers := make(net.Buffers, 3)
	n := testing.AllocsPerRun(100, func() {
		r.into = r.into[:0]
		buffers[0], buffers[1], buffers[2] = header, payload[:300], payload[300:] // as a batch comes
		if out.Send(buffers) != nil {
			t.Fatal("sending failed")
		}
		r.in = r.out.Bytes()
		if in.ReadHeader(&h) != nil || in.ReadPayload(payload) != nil {
			t.Fatal("reading failed")
		}
		r.out.Reset()
	})
	if n > 0 {
		t.Errorf("%v allocations to send a frame with tags and read it", n)
	}
}

// FuzzTaggedStream has a peer without the keys send any bytes at all: not one frame comes of them.
func FuzzTaggedStream(f *testing.F) {
	_, server := sessions(f, auth.Control)
	other, _ := sessions(f, auth.Control)
	r := &recorder{}
	_, plain := sample(20)
	if err := newConn(r, other).Send(net.Buffers{plain}); err != nil {
		f.Fatal(err)
	}
	f.Add(plain)
	f.Add(r.out.Bytes())
	f.Fuzz(func(t *testing.T, input []byte) {
		c := newConn(&ending{script{in: input}}, server)
		var h wire.Header
		if err := c.ReadHeader(&h); err == nil {
			t.Errorf("frame %+v came", h)
		}
	})
}

func BenchmarkTags(b *testing.B) {
	for _, size := range []int{0, 1000, 64 << 10, 4 << 20} {
		for name, level := range map[string]auth.Level{"none": auth.Below, "control": auth.Control, "all": auth.All} {
			client, _ := sessions(b, level)
			h := wire.Header{Type: wire.TypePush, Length: uint32(size)}
			header, payload := h.Append(nil), make([]byte, size)
			c := newConn(&script{}, client)
			buffers := make(net.Buffers, 2)
			b.Run(name+"/"+strconv.Itoa(size), func(b *testing.B) {
				b.SetBytes(int64(size))
				for b.Loop() {
					buffers[0], buffers[1] = header, payload
					_ = c.Send(buffers)
				}
			})
		}
	}
}
