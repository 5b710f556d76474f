package node

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/policy"
)

// measured is the setting under which optimizers choose codecs by what they measure; all else is plain then.
const measured = "auto"

// Compression reads how tensors are to be coded: a setting, rules, or the path of a file with them.
func Compression(text string) (*policy.Policy, error) { return policy.Load(text, openFile) }

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
	said = text
	p, err = policy.Load(text, func(path string) (io.ReadCloser, error) {
		content, err := os.ReadFile(path)
		said = fmt.Sprintf("a file with SHA-256 %x", sha256.Sum256(content))
		return io.NopCloser(bytes.NewReader(content)), err
	})
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

func openFile(path string) (io.ReadCloser, error) { return os.Open(path) }
