package condition

import (
	"strings"
	"testing"
)

// Run-time control (FluentPS section III-B): a condition sees progress, V, N, count, the fastest and
// the slowest progress and the significance.
func TestExpressionSeesTheView(t *testing.T) {
	v := View{Rank: 1, Progress: 7, V: 5, N: 4, Fastest: 8, Slowest: 5, Significance: 0.25, count: func(i uint64) int { return int(i) - 4 }}
	for text, want := range map[string]bool{
		"progress == 7 && V == 5 && N == 4 && fastest == 8 && slowest == 5 && lead == 2": true,
		"significance == 0.25":                                    true,
		"count[V] == 1 and count[6] > 1":                          true,
		"count[V + count[V]] == 2":                                true,
		"lead < 2 || significance > 0.5":                          false,
		"lead < (N > 3 ? 3 : 1)":                                  true,
		"progress / N == 1.75":                                    true,
		"progress % max(V - 7, 2) == 1":                           true,
		"abs(-lead) == min(2, 3) && floor(7/2) == 3 && not false": true,
		"2 ** lead == 4":                                          true,
	} {
		c, err := ParsePull(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
		} else if got := c.Holds(v); got != want {
			t.Errorf("%s: %v", text, got)
		}
	}
}

// A closed iteration is never withheld and one that all have pushed is never left open, or a worker
// could wait for ever.
func TestExpressionNeverKeepsAWorkerForEver(t *testing.T) {
	pull, err := ParsePull("false")
	if err != nil {
		t.Fatal(err)
	}
	push, err := ParsePush("false")
	if err != nil {
		t.Fatal(err)
	}
	v := View{Progress: 2, V: 3, N: 2, count: func(uint64) int { return 2 }}
	if !pull.Holds(v) || !push.Holds(v) {
		t.Error("held")
	}
	v.Progress, v.N = 3, 3
	if pull.Holds(v) || push.Holds(v) {
		t.Error("not held")
	}
}

func TestExpressionErrorsSayWhichAndWhatIsAllowed(t *testing.T) {
	for text, want := range map[string]string{
		"lead <":                                 "column 6: unexpected token EOF: allowed is a comparison",
		"lag < 3":                                `unknown name "lag": allowed are progress, lead, significance, V, N, count[i], fastest, slowest`,
		"lead + 3":                               "is a whole number, allowed is a comparison",
		"lead < true":                            "true is true or false where only a number is allowed",
		"1 / 0 > 1":                              "divides by 0, which can be zero: allowed is what never is",
		"1 / lead > 1":                           "divides by lead",
		"5 % (V - 1) > 1":                        "divides by V - 1",
		"1 / -V > 1":                             "divides by -V",
		"1 / min(V, 2) > 1":                      "divides by min(V, 2)",
		"1 / (count[V] * N) > 1":                 "divides by count[V] * N",
		"V % (4294967296 * 4294967296) == 0":     "divides by 4294967296 * 4294967296, which can be zero",
		"V % (N * 4611686018427387904) == 0":     "divides by N * 4611686018427387904",
		"V % (V + 9223372036854775807 + 1) == 0": "divides by V + 9223372036854775807 + 1",
		"V % (9007199254740993 + 2 - 9007199254740995) == 0": "which can be zero",
		"V % (9007199254740995 - 9007199254740993 - 2) == 0": "which can be zero",
		"V % (V*V + 1) == 0":               "divides by V * V + 1",
		"let x = 1; x > 0":                 "is not part of a condition: allowed are numbers",
		"[1, 2][V] > 0":                    "is not part of a condition",
		"any(1..1000000000, # > V)":        "is not part of a condition",
		`"a" == "b"`:                       "is not part of a condition",
		"V in 1..2":                        `the operator "in" is not part`,
		"lead > 1 ? true : 0":              "0 is a whole number where only true or false is allowed",
		"5 % max(0.5, 1) > 0":              "max(0.5, 1) is a number where only a whole number is allowed",
		"lead and true":                    "lead is a whole number where only true or false is allowed",
		"count > 1":                        "write count[V]",
		"fastest.x > 1":                    "is not part of a condition",
		"now() > 1":                        "is not part of a condition",
		"V == nil":                         "is not part of a condition",
		"count[0.5] > 1":                   "0.5 is a number where only a whole number is allowed",
		strings.Repeat("V+", 500) + "1> 0": "is 1004 bytes long, allowed are 1000",
	} {
		if _, err := ParsePull(text); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got error %v, want one with %q", text, err, want)
		}
	}
	for _, text := range []string{"1/N > 0", "1/(V+1) > 0", "1/-2 < 0", "1/max(lead, 1) > 0", "1/(2*N) > 0", "V % 2 == 0", "1/(abs(lead)+1) > 0", "1/min(N, 2) > 0", "V % (max(lead, 1) * N) == 0", "1/(-V - 1) < 0", "V % 9223372036854775807 == 0", "1/(V*V + 1) < 1", "V % (V*N + 1) == 0"} {
		if _, err := ParsePull(text); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := ParsePush("lead > 1"); err == nil || !strings.Contains(err.Error(), `push condition "lead > 1": unknown name "lead": allowed are V, N`) {
		t.Errorf("a push condition that asks who pushes: %v", err)
	}
}

// What compiles does not fail, whatever it is.
func FuzzExpression(f *testing.F) {
	for _, text := range []string{"lead < 3", "count[V] >= N - 1", "1/max(V, 1) < 2 || significance > 0.5", "V % 3 == 0 ? true : not (lead > 2)", "-V ** 2 < ceil(1.5)", "V % (4294967296 * 4294967296) == 0"} {
		f.Add(text, uint64(3), uint64(2), 4)
	}
	f.Fuzz(func(t *testing.T, text string, progress, v uint64, n int) {
		program, err := compile(text, pullNames)
		if err != nil || len(text) > 100 {
			return
		}
		view := View{Progress: progress % MaxLead, V: v % MaxLead, N: n & 1023, Fastest: progress % 77, Significance: 0.5}
		if _, err := run(program, view); err != nil {
			t.Errorf("%q fails: %v", text, err)
		}
	})
}

func BenchmarkExpression(b *testing.B) {
	c, err := ParsePull("lead < 3 || significance < 0.01")
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		c.Holds(View{Progress: 7, V: 3, N: 4})
	}
}
