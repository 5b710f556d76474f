package tcp

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/paceline/paceline/transport"
)

// authority issues certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t}
	a.cert, a.key = a.sign(&x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

// sign makes a certificate, of the authority itself where it has none yet.
func (a *authority) sign(c *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c.SerialNumber = big.NewInt(1)
	if c.NotAfter.IsZero() {
		c.NotAfter = time.Now().Add(time.Hour)
	}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return parsed, key
}

// node is the configuration of a node that has a certificate of the authority, for an address and until a time, and
// trusts another authority.
func (a *authority) node(address string, until time.Time, trusts *authority) *tls.Config {
	cert, key := a.sign(&x509.Certificate{IPAddresses: []net.IP{net.ParseIP(address)}, NotAfter: until})
	pool := x509.NewCertPool()
	pool.AddCert(trusts.cert)
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}},
		RootCAs:      pool, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
	}
}

// Whichever side refuses the other one's certificate, both know at once: the dialling node does not try again, and the log
// of the other one has one line.
func TestARefusedCertificateIsAnErrorAtOnce(t *testing.T) {
	ours, foreign := newAuthority(t), newAuthority(t)
	hour, past := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
	good := ours.node("127.0.0.1", hour, ours)
	nobody := good.Clone()
	nobody.Certificates = nil
	for name, c := range map[string]struct {
		listens, dials *tls.Config
		want           string
	}{
		"the server's is of another authority": {foreign.node("127.0.0.1", hour, ours), good, "a certificate that this node has refused: x509: certificate signed by unknown authority"},
		"the server's has expired":             {ours.node("127.0.0.1", past, ours), good, "certificate has expired"},
		"the server's has another address":     {ours.node("127.0.0.2", hour, ours), good, "certificate is valid for 127.0.0.2, not 127.0.0.1"},
		"the client's is of another authority": {good, foreign.node("127.0.0.1", hour, ours), "has refused this node's certificate"},
		"the client's has expired":             {good, ours.node("127.0.0.1", past, ours), "has refused this node's certificate"},
		"the client has none":                  {good, nobody, "has refused this node's certificate"},
	} {
		t.Run(name, func(t *testing.T) {
			core, logged := observer.New(zap.WarnLevel)
			l, err := New(Config{Secret: []byte("secret"), TLS: c.listens, Log: zap.New(core)}).Listen("127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			_, err = New(Config{Secret: []byte("secret"), TLS: c.dials}).Dial(t.Context(), l.Addr().String())
			if !errors.Is(err, transport.ErrAuth) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), l.Addr().String()) {
				t.Errorf("error %v, want transport.ErrAuth with %q", err, c.want)
			}
			l.Close()
			if n := logged.Len(); n != 1 {
				t.Errorf("%d lines are logged, want 1: %v", n, logged.All())
			}
		})
	}
}

// Both nodes know at once that only one of them uses TLS, whichever dials.
func TestANodeWithTLSAndOneWithoutSaySoAtOnce(t *testing.T) {
	ours := newAuthority(t)
	with := ours.node("127.0.0.1", time.Now().Add(time.Hour), ours)
	for name, c := range map[string]struct {
		listens, dials *tls.Config
		hears, logs    string
	}{
		"the dialling node": {nil, with, "does not use TLS, which this node does", "uses TLS, which this node does not"},
		"the other one":     {with, nil, "uses TLS, which this node does not", "does not use TLS, which this node does"},
	} {
		t.Run(name, func(t *testing.T) {
			core, logged := observer.New(zap.WarnLevel)
			l, err := New(Config{Secret: []byte("secret"), TLS: c.listens, Log: zap.New(core)}).Listen("127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			_, err = New(Config{Secret: []byte("secret"), TLS: c.dials}).Dial(t.Context(), l.Addr().String())
			if !errors.Is(err, transport.ErrAuth) || !strings.Contains(err.Error(), c.hears) || !strings.Contains(err.Error(), "PACELINE_TLS_CERT") {
				t.Errorf("error %v, want transport.ErrAuth with %q", err, c.hears)
			}
			l.Close()
			if all := logged.All(); len(all) != 1 || !strings.Contains(fmt.Sprint(all), c.logs) {
				t.Errorf("logged: %v, want one line with %q", all, c.logs)
			}
		})
	}
}
