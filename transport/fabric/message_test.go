//go:build cgo

package fabric

import (
	"bytes"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// samples is a message of each kind.
func samples() map[kind][]byte {
	data := append(make([]byte, headSize), "payload"...)
	head(data, 7, kindData, 7)
	offer := make([]byte, offerSize)
	head(offer, 7, kindOffer, 0)
	putSource(offer, source{address: 1, key: 2, length: 3})
	write := make([]byte, writeSize)
	head(write, 7, kindWrite, 0)
	putSource(write, source{address: 1, key: 2, length: 3})
	putWrite(write, wire.Token{Region: 4, Key: 5, Offset: 6, Length: 7}, 8, 9)
	returned := make([]byte, headSize)
	head(returned, 7, kindReturn, 3|2<<32)
	return map[kind][]byte{kindData: data, kindOffer: offer, kindWrite: write, kindReturn: returned}
}

func TestMessagesAreReadAsTheyWereWritten(t *testing.T) {
	for k, b := range samples() {
		m, err := parse(b)
		if err != nil || m.kind != k || keyOf(b) != 7 {
			t.Fatalf("kind %d: %+v, %v", k, m, err)
		}
		switch k {
		case kindData:
			if !bytes.Equal(b[m.from:m.to], []byte("payload")) {
				t.Errorf("data from %d to %d", m.from, m.to)
			}
		case kindWrite:
			if m.at != 8 || m.left != 9 || m.token != (wire.Token{Region: 4, Key: 5, Offset: 6, Length: 7}) {
				t.Errorf("write %+v", m)
			}
			fallthrough
		case kindOffer:
			if m.source != (source{1, 2, 3}) {
				t.Errorf("source %+v", m.source)
			}
		case kindReturn:
			if m.messages != 3 || m.sources != 2 {
				t.Errorf("return %+v", m)
			}
		}
		for n := headSize; n < len(b); n++ {
			if _, err := parse(b[:n]); err == nil {
				t.Errorf("kind %d: the first %d bytes of %d are a message", k, n, len(b))
			}
		}
		if _, err := parse(append(b, 0)); err == nil {
			t.Errorf("kind %d: a message with a byte behind it", k)
		}
	}
}

func TestNumbersOutOfBoundsAreRefused(t *testing.T) {
	all := samples()
	head(all[kindData], 7, kindData, slotBytes)
	putSource(all[kindOffer], source{length: limits.MaxTensor + 1})
	putWrite(all[kindWrite], wire.Token{Length: limits.MaxTensor + 1}, 0, 0)
	head(all[kindReturn], 7, kindReturn+1, 0)
	for k, want := range map[kind]string{kindData: "8192 bytes", kindOffer: "limit", kindWrite: "bad token", kindReturn: "of kind 5"} {
		if _, err := parse(all[k]); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("kind %d: error %v, want one with %q", k, err, want)
		}
	}
}

func FuzzMessage(f *testing.F) {
	for _, b := range samples() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headSize || len(b) > slotBytes {
			return
		}
		m, err := parse(b)
		switch {
		case err != nil:
		case m.kind == kindData && (m.from != headSize || m.to != len(b)):
			t.Errorf("data from %d to %d of %d bytes", m.from, m.to, len(b))
		case (m.kind == kindOffer || m.kind == kindWrite) && (m.length < 1 || m.length > limits.MaxTensor):
			t.Errorf("an offer of %d bytes", m.length)
		}
	})
}
