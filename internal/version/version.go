// Package version holds the one place in which Paceline's version is written: the file VERSION
// beside this one. The wheel's metadata is read from it too.
package version

import (
	_ "embed" // VERSION
	"strings"
)

//go:embed VERSION
var file string

// String is Paceline's version, valid in PEP 440 as in semantic versioning: "0.1.0".
func String() string { return strings.TrimSpace(file) }
