package condition

import (
	"slices"
	"strings"
	"testing"
)

// A model's name is a setting that makes the same model.
func TestParseKnowsEveryModel(t *testing.T) {
	settings := map[string]string{ // and the name, where it differs
		"bsp": "", "asp": "", "ssp:0": "", "ssp:3": "", "dsps": "dsps:3,15", "dsps:1,2": "", "drop-stragglers:3": "",
		"pssp:3,0.5": "", "pssp:3, 1/": "error", "pssp:3,1,77": "", "dynamic-pssp:2,0.25": "", "dynamic-pssp:2,significance": "",
		"dynamic-pssp:2,significance,9": "", "adaptive:3,2": "", "elastic:15": "",
		"expression:lead < 2": "", "expression:lead < 2;count[V] > 1": "", "expression:;count[V] > 1": "",
	}
	var seen []string
	for setting, name := range settings {
		m, err := Parse(setting)
		if name == "error" {
			if err == nil {
				t.Errorf("%s: no error", setting)
			}
			continue
		}
		if name == "" {
			name = setting
		}
		if err != nil || m.Name != name {
			t.Errorf("%s: %q, %v", setting, m.Name, err)
			continue
		}
		if again, err := Parse(m.Name); err != nil || again.Name != m.Name || again.Pull.String() != m.Pull.String() || again.Push.String() != m.Push.String() {
			t.Errorf("%s: again %+v, %v", m.Name, again, err)
		}
		kind, _, _ := strings.Cut(setting, ":")
		seen = append(seen, kind)
	}
	for _, name := range Names() {
		if !slices.Contains(seen, name) {
			t.Errorf("no setting of %s is tried", name)
		}
	}
}

// Bad input is an error that says which and what is allowed (issue: negative s, c outside [0,1], …).
func TestParseSaysWhatIsAllowed(t *testing.T) {
	for setting, want := range map[string]string{
		"bps":                  `unknown synchronisation model "bps", did you mean "bsp"? Known are: bsp, asp, ssp, `,
		"bsp:3":                `takes no argument "3"`,
		"ssp":                  `S is missing (it is written ssp:S)`,
		"ssp:":                 `S is "", allowed is a whole number from 0 to 65535`,
		"ssp:-1":               `S is "-1", allowed is a whole number from 0 to 65535`,
		"ssp:65536":            `S is "65536"`,
		"ssp:3,4":              `takes no argument "4"`,
		"dsps:5,3":             `HIGH is "3", allowed is a whole number from 5 to 65535`,
		"dsps:5":               `HIGH is missing`,
		"drop-stragglers:0":    `NT is "0", allowed is a whole number from 1`,
		"pssp:3,1.5":           `C is "1.5", allowed is a number from 0 to 1`,
		"pssp:3,-0.1":          `C is "-0.1", allowed is a number from 0 to 1`,
		"pssp:3,NaN":           `C is "NaN"`,
		"pssp:3,0.5,x":         `SEED is "x"`,
		"dynamic-pssp:3,alpha": `ALPHA is "alpha"`,
		"adaptive:0,1":         `S is "0", allowed is a whole number from 1`,
		"adaptive:3":           `W is missing`,
		"elastic:0":            `R is "0", allowed is a whole number from 1 to 10000`,
	} {
		if _, err := Parse(setting); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want one with %q", setting, err, want)
		}
	}
}

// A model that does not fit the dataflow, or the number of workers, is an error.
func TestCheckKnowsDataflowAndWorkers(t *testing.T) {
	for setting, aggregate := range map[string]bool{
		"bsp": true, "ssp:0": true, "drop-stragglers:2": true, "pssp:0,1": true, "expression:;count[V] > 1": true, "asp": false, "ssp:1": false,
		"dsps": false, "pssp:0,0.5": false, "pssp:1,1": false, "dynamic-pssp:0,1": false, "adaptive:1,1": false, "elastic:1": false, "expression:lead<2": false,
	} {
		m, err := Parse(setting)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Check(Aggregate); (err == nil) != aggregate {
			t.Errorf("%s on an aggregate key: %v", setting, err)
		} else if err != nil && !strings.Contains(err.Error(), "declare the tensor as accumulate") {
			t.Errorf("%s: %v does not say what to do", setting, err)
		}
		if err := m.Check(Accumulate); err != nil {
			t.Errorf("%s on an accumulate key: %v", setting, err)
		}
	}
	if err := DropStragglers(3).CheckWorkers(2); err == nil || !strings.Contains(err.Error(), "waits for 3 workers of 2: allowed is from 1 to 2") {
		t.Errorf("Nt > N: %v", err)
	}
	if err := DropStragglers(2).CheckWorkers(2); err != nil {
		t.Error(err)
	}
}
