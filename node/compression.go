package node

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/policy"
	"github.com/paceline/paceline/internal/limits"
)

// measured is the setting under which optimizers choose codecs by what they measure; all else is plain then.
const measured = "auto"

// Compression reads how tensors are to be coded: a setting, rules, or the path of a file with them.
func Compression(text string) (*policy.Policy, error) {
	p, _, err := readCompression(text)
	return p, err
}

// readCompression also gives what stands in the file whose path the text is, if it is one.
func readCompression(text string) (p *policy.Policy, content []byte, err error) {
	p, err = policy.Parse(text)
	if err == nil || !isPath(text) {
		return p, nil, err
	}
	f, err := os.Open(text)
	if err != nil {
		return nil, nil, fmt.Errorf("policy: %w", err)
	}
	defer f.Close()
	content, err = io.ReadAll(io.LimitReader(f, limits.MaxPolicy+1))
	if err != nil {
		return nil, nil, fmt.Errorf("policy: %w", err)
	}
	if p, err = policy.Parse(string(content)); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", text, err)
	}
	return p, content, nil
}

// isPath distinguishes a path from a setting or rules: it has a slash, or ends in .json.
func isPath(text string) bool {
	return !strings.HasPrefix(strings.TrimSpace(text), "[") && (strings.ContainsRune(text, '/') || strings.HasSuffix(text, ".json"))
}

// checked adds to an error what else may stand where the user names one codec for all tensors.
func checked(text string, err error) error {
	if codec.IsUnknown(err) && !strings.HasPrefix(strings.TrimSpace(text), "[") {
		return fmt.Errorf("%w, and %s", err, measured)
	}
	return err
}

// jobCompression reads a job's setting. said is what all ranks must have alike: the text, or a hash of what stands in its
// file.
func jobCompression(text string) (p *policy.Policy, said string, err error) {
	if text == measured {
		return nil, text, nil
	}
	p, content, err := readCompression(text)
	if said = text; content != nil {
		said = fmt.Sprintf("a file with SHA-256 %x", sha256.Sum256(content))
	}
	if err = checked(text, err); err != nil {
		err = fmt.Errorf("PACELINE_COMPRESSION: %w", err)
	}
	return p, said, err
}

// CheckCodec reports whether Compression takes a text. It is for the place where the user names a codec, before
// training starts.
func CheckCodec(text string) error {
	_, err := Compression(text)
	return checked(text, err)
}

// CodecInfo is the properties of the codecs that a text names, in JSON, for bindings: a list with one for each rule.
func CodecInfo(text string) ([]byte, error) {
	p, err := Compression(text)
	if err != nil {
		return nil, checked(text, err)
	}
	return json.Marshal(p.Traits())
}
