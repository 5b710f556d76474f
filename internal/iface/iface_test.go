package iface

import (
	"errors"
	"net"
	"strings"
	"testing"
)

func TestAddressOfLoopback(t *testing.T) {
	for _, name := range []string{"lo", "127.0.0.1", "no-such0,lo", "192.0.2.77, 127.0.0.1"} {
		if got, err := Address(name); err != nil || got != Loopback {
			t.Fatal(name, got, err)
		}
	}
	for _, name := range []string{"no-such0", "192.0.2.77", ""} {
		if _, err := Address(name); err == nil || !strings.Contains(err.Error(), "no interface or address \""+name+"\"") || !strings.Contains(err.Error(), "lo 127.0.0.1") {
			t.Fatal(name, err)
		}
	}
}

func TestTowardsLoopbackLeavesFromLoopback(t *testing.T) {
	if got, err := Towards(Loopback); err != nil || got != Loopback {
		t.Fatal(got, err)
	}
}

func TestWhoIsLocal(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "127.0.0.1": true, "::1": true, "127.3.2.1": true,
		"me.example": true, "me": true, "you": false, "192.0.2.77": false,
	} {
		if got := IsLocal(host, "me.example"); got != want {
			t.Errorf("IsLocal(%q) = %v", host, got)
		}
	}
}

func TestNamesOfThisMachineThatLeadToLoopback(t *testing.T) {
	outward, err := Outward()
	if err != nil {
		t.Skip(err) // a machine with nothing but loopback
	}
	here, other, own := net.IPv4(127, 0, 1, 1), net.IPv4(203, 0, 113, 2), net.ParseIP(outward)
	for _, c := range []struct {
		host    string
		found   []net.IP
		address string
		own     bool
	}{
		{"me", []net.IP{here}, "", true},
		{"me", []net.IP{net.IPv6loopback}, "", true},
		{"me", []net.IP{here, own}, outward, true},
		{"me", []net.IP{own, here}, outward, true},
		{"me", []net.IP{own}, outward, false},
		{"you", []net.IP{other}, "", false},
		{"nobody", nil, "", false},
		{"localhost", []net.IP{here}, "", false},
		{Loopback, []net.IP{net.ParseIP(Loopback)}, "", false},
	} {
		address, own := Own(c.host, func(string) ([]net.IP, error) {
			if c.found == nil {
				return nil, errors.New("no such host")
			}
			return c.found, nil
		})
		if address != c.address || own != c.own {
			t.Errorf("%s at %v: %q, %v", c.host, c.found, address, own)
		}
	}
}
