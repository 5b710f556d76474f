package sim

import (
	"strings"
	"testing"
	"time"
)

func TestComputeTimesThatMakeNoSenseAreRefused(t *testing.T) {
	for setting, want := range map[string]string{
		"":                         `unknown compute time "", allowed are constant:T`,
		"gauss:1s":                 "unknown compute time",
		"constant":                 "T is missing (it is written constant:T)",
		"constant:5":               `T is "5", allowed is a time as 250ms`,
		"constant:-5ms":            "allowed is a time",
		"constant:61m":             "to 1h0m0s",
		"constant:1s,2s":           `takes no argument "2s"`,
		"uniform:2s,1s":            `HIGH is "1s", allowed is a time as 250ms, from 2s`,
		"lognormal:1s":             "SIGMA is missing",
		"lognormal:1s,4":           `SIGMA is "4", allowed is a number from 0 to 3`,
		"lognormal:1s,NaN":         "allowed is a number",
		"slow:1s,0.5":              `FACTOR is "0.5", allowed is a number from 1`,
		"transient:1s,1.5,3":       `P is "1.5", allowed is a number from 0 to 1`,
		"spread:1s,2s,0.1,0.1":     "takes no argument",
		"transient:100ms,0.05,5,x": `SIGMA is "x"`,
	} {
		if _, err := ParseCompute(setting); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: want %q, got %v", setting, want, err)
		}
	}
}

// Times that a setting allows may add up to more than a time.Duration holds.
func TestRunsThatWouldTakeForEverAreRefused(t *testing.T) {
	for name, set := range map[string]func(*Scenario){
		"iterations": func(s *Scenario) { s.Iterations = 3000 },
		"link":       func(s *Scenario) { s.Bytes, s.Bandwidth = MaxBytes, 1 },
		"server":     func(s *Scenario) { s.Bytes, s.ServerBandwidth = MaxBytes, 1 },
	} {
		s := scenario(t, "asp", "slow:1h,1000", set)
		if r, err := Run(s); err == nil || !strings.Contains(err.Error(), "more than 37 years of virtual time") {
			t.Errorf("%s: %v, %+v", name, err, r)
		}
	}
	s := scenario(t, "asp", "constant:1s", func(s *Scenario) { s.Latency = 2 * MaxDelay })
	if err := s.Check(); err == nil || !strings.Contains(err.Error(), "latency is 2h0m0s and server cost 0s, allowed is 0 to 1h0m0s") {
		t.Errorf("latency: %v", err)
	}
}

// The time of all workers together may be longer than a time.Duration holds.
func TestSharesOfLongRunsAreRight(t *testing.T) {
	r := mustRun(t, scenario(t, "asp", "transient:1h,1,1000", func(s *Scenario) { s.Workers, s.Iterations = 100, 26 }))
	if r.Compute < 0.99 {
		t.Errorf("computing is %v of the time: %+v", r.Compute, r)
	}
}

func TestBandwidthIsRead(t *testing.T) {
	for text, want := range map[string]Bandwidth{"10Gbit": 10e9, "800Mbit": 800e6, "1.5Kbit": 1500, "unlimited": 0} {
		got, err := ParseBandwidth(text)
		if err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "10", "10GB", "-1Gbit", "0Gbit", "NaNGbit", "InfGbit"} {
		if _, err := ParseBandwidth(text); err == nil || !strings.Contains(err.Error(), "allowed is a number above 0") {
			t.Errorf("%q: %v", text, err)
		}
	}
	if got := Bandwidth(1e9).hold(125_000_000); got != time.Second {
		t.Errorf("125 MB at 1 Gbit/s take %v", got)
	}
}

func TestQueueBringsEventsInOrder(t *testing.T) {
	var q queue
	for k := range 1000 {
		q.add(time.Duration(k*7919%101), head, k, 0)
	}
	var last event
	for n := 1000; n > 0; n-- {
		if q.len() != n {
			t.Fatalf("%d events, want %d", q.len(), n)
		}
		e := q.next()
		if e.before(&last) {
			t.Fatalf("%+v after %+v", e, last)
		}
		last = e
	}
}

// A chart is drawn from numbers and names alone; names cannot break it.
func TestChartIsSVG(t *testing.T) {
	c := Chart{Title: "a < b", Unit: "s", Parts: []string{"x", "y"}, Bars: []Bar{{Label: "part"}, {Label: "one", Values: []float64{1, 3}}, {Label: "none", Values: []float64{0}}}}
	svg := c.SVG()
	for _, want := range []string{"<svg ", "a &lt; b", ">one<", ">4 s<", ">0 s<", "</svg>"} {
		if !strings.Contains(svg, want) {
			t.Errorf("no %q in\n%s", want, svg)
		}
	}
	if empty := (Chart{}).SVG(); strings.Contains(empty, "NaN") {
		t.Error(empty)
	}
}
