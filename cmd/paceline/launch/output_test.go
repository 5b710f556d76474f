package launch

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
)

func TestEveryLineHasItsPrefixHoweverItComes(t *testing.T) {
	text := "one\ntwo\r\n10%\r20%\rdone\n\nno end"
	want := "[0]<stdout>:one\n[0]<stdout>:two\r\n[0]<stdout>:10%\r[0]<stdout>:20%\r[0]<stdout>:done\n[0]<stdout>:\n[0]<stdout>:no end\n"
	random := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		var out bytes.Buffer
		var file closable
		s := (&Console{Stdout: &out}).Stream("0", false, &file)
		for rest := text; rest != ""; {
			n := 1 + random.IntN(len(rest))
			s.Write([]byte(rest[:n]))
			rest = rest[n:]
		}
		s.Close()
		if out.String() != want || file.String() != text || !file.closed {
			t.Fatalf("%q, file %q, closed: %v", out.String(), file.String(), file.closed)
		}
	}
}

// closable is a file.
type closable struct {
	bytes.Buffer
	closed bool
}

func (c *closable) Close() error {
	c.closed = true
	return nil
}

func TestALongLineHasOnePrefix(t *testing.T) {
	var out bytes.Buffer
	s := (&Console{Stderr: &out}).Stream("3", true, nil)
	long := strings.Repeat("x", 3*maxHeld/2)
	fmt.Fprint(s, long)
	fmt.Fprint(s, long, "\nnext\n")
	s.Close()
	if out.String() != "[3]<stderr>:"+long+long+"\n[3]<stderr>:next\n" {
		t.Fatal(len(out.String()))
	}
}

func TestTimestampsComeBeforeThePrefix(t *testing.T) {
	var out bytes.Buffer
	s := (&Console{Stdout: &out, Timestamps: true}).Stream("0", false, nil)
	fmt.Fprintln(s, "hello")
	if !regexp.MustCompile(`^[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:hello\n$`).Match(out.Bytes()) {
		t.Fatal(out.String())
	}
}
