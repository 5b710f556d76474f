package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestAScriptIsNoProgram(t *testing.T) {
	c := command(t, "run", "./x.py", "--epochs", "3")
	if err := os.WriteFile(filepath.Join(c.Dir, "x.py"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, c).check(t, 127, "", "x.py is no program; run it as python ./x.py --epochs 3")
}

// TestRunRefusesSettingsThatNoRankWouldTake in one line, before it starts any.
func TestRunRefusesSettingsThatNoRankWouldTake(t *testing.T) {
	for setting, want := range map[string]string{
		"PACELINE_SYNC=sps:3":             `unknown synchronisation model "sps:3", did you mean "ssp"? Known are: bsp, `,
		"PACELINE_SYNC=adaptiv:1,1":       `did you mean "adaptive"?`,
		"PACELINE_SYNC=ssp:x":             "ssp:S",
		"PACELINE_SYNC=drop-stragglers:3": "allowed is from 1 to 2",
		"PACELINE_COMPRESSION=int9":       `unknown name "int9", did you mean "int4"? Known are: bf16, `,
		"PACELINE_COMPRESSION=fp61":       `did you mean "fp16"?`,
		"PACELINE_COMPRESSION=/no/rules":  "/no/rules",
		"PACELINE_COMPRESSION=[{}]":       "rule 1",
		"PACELINE_PLACEMENT=psdl:0.2":     `did you mean "psld"?`,
	} {
		c := command(t, "run", "-np", "2", "echo", "started")
		c.Env = append(c.Env, setting)
		name, _, _ := strings.Cut(setting, "=")
		if r := run(t, c); r.code != 1 || r.stdout != "" || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, name) || !strings.Contains(r.stderr, want) {
			t.Errorf("%s: %+v", setting, r)
		}
	}
	c := command(t, "run", "-H", "hostA:1,hostB:1", "--network-interfaces", "lo", "--remote-shell", "env -i PATH=/usr/bin:/bin {host}=", "echo", "started")
	c.Env = append(c.Env, "PACELINE_COMPRESSION=/on/those/hosts/alone")
	run(t, c).check(t, 0, "started", "")
}
