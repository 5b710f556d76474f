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
		var out, file bytes.Buffer
		s := (&Console{Stdout: &out}).Stream("0", false, &file)
		for rest := text; rest != ""; {
			n := 1 + random.IntN(len(rest))
			s.Write([]byte(rest[:n]))
			rest = rest[n:]
		}
		s.Flush()
		if out.String() != want || file.String() != text {
			t.Fatalf("%q, file %q", out.String(), file.String())
		}
	}
}

func TestALongLineHasOnePrefix(t *testing.T) {
	var out bytes.Buffer
	s := (&Console{Stderr: &out}).Stream("3", true, nil)
	long := strings.Repeat("x", 3*maxHeld/2)
	fmt.Fprint(s, long)
	fmt.Fprint(s, long, "\nnext\n")
	s.Flush()
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
